"""Cron expressions, fire times, changes of clocks, and schedules that several workers fire."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.jobs.job import JobSpec
from dovetail.jobs.job_id import new_job_id
from dovetail.jobs.schedule import CronError, fire_schedule, job_of, next_fire, parse_cron, parse_zone
from dovetail.jobs.store import Claim, Exchange, JobFilter, Schedule
from dovetail.jobs.stores.memory_store import MemoryStore
from jobs.store_contract import CPU_NODE, free_of
from jobs.test_memory_store import ManualClock

BERLIN = "Europe/Berlin"


def ms(text: str, zone: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def fires(cron: str, zone: str, after: str, count: int) -> list[str]:
    """The next fire times in UTC, without the seconds."""
    found, time = [], ms(after)
    for _ in range(count):
        time = next_fire(cron, zone, time)
        found.append(datetime.fromtimestamp(time / 1000, UTC).strftime("%m-%d %H:%M"))
    return found


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("0 3 * * *", "2026-01-01T03:00", ["01-02 03:00", "01-03 03:00"]),
        ("0 3 * * *", "2026-01-01T02:59:59.999", ["01-01 03:00"]),
        ("*/15 8-9 * * *", "2026-01-01T08:31", ["01-01 08:45", "01-01 09:00", "01-01 09:15"]),
        ("5/20 0 * * *", "2026-01-01T00:00", ["01-01 00:05", "01-01 00:25", "01-01 00:45", "01-02 00:05"]),
        ("0 12 * * mon-fri", "2026-01-02T13:00", ["01-05 12:00", "01-06 12:00"]),
        ("0 12 * * 7", "2026-01-01T00:00", ["01-04 12:00", "01-11 12:00"]),
        ("0 12 * * sat-sun", "2026-01-01T00:00", ["01-03 12:00", "01-04 12:00", "01-10 12:00"]),
        ("0 0 13 * fri", "2026-01-01T00:00", ["01-02 00:00", "01-09 00:00", "01-13 00:00", "01-16 00:00"]),
        ("0 0 */10 * fri", "2026-05-01T00:00", ["07-31 00:00", "08-21 00:00"]),
        ("0 0 31 * *", "2026-01-31T00:00", ["03-31 00:00", "05-31 00:00"]),
        ("0 0 29 feb *", "2097-01-01T00:00", ["02-29 00:00"]),
        ("@hourly", "2026-01-01T00:00", ["01-01 01:00", "01-01 02:00"]),
        ("@weekly", "2026-01-01T00:00", ["01-04 00:00"]),
        ("@yearly", "2026-01-01T00:00", ["01-01 00:00"]),
        ("59,1,1 23,0 1,15 JAN,dec *", "2026-01-15T23:59", ["12-01 00:01", "12-01 00:59", "12-01 23:01"]),
    ],
)
def test_the_next_fire_times(cron: str, after: str, expected: list[str]) -> None:
    assert fires(cron, "UTC", after, len(expected)) == expected


@pytest.mark.parametrize(
    ("cron", "reason", "instead"),
    [
        ("", "has 0 fields", "0 3 * * *"),
        ("* * *", "has 3 fields", "0 3 * * *"),
        ("0 0 3 * * *", "seconds are not supported", "0 3 * * *"),
        ("60 * * * *", "'60' as minute, which is not 0-59", "* * * * *"),
        ("0 24 * * *", "'24' as hour, which is not 0-23", "0 * * * *"),
        ("0 0 0 * *", "'0' as day of month, which is not 1-31", "0 0 * * *"),
        ("0 0 * augu *", "which is not 1-12 or jan-dec", "0 0 * aug *"),
        ("0 0 * * mno", "which is not 0-7 or sun-sat", "0 0 * * mon"),
        ("0 17-8 * * *", "the range ends before it starts", "0 17-23,0-8 * * *"),
        ("*/0 * * * *", "the step is not a number from 1 to 59", "* * * * *"),
        ("0 0 L * *", "'l' as day of month", "0 0 * * *"),
        ("0 0 ? * *", "'?' as day of month, which is not a value, range, step or list", "0 0 * * *"),
        ("0 0 1,,2 * *", "'' as day of month", "0 0 * * *"),
        ("0 0 30 feb *", "never fires", "0 3 1 * *"),
        ("@dayly", "is none of @hourly", "@daily"),
        ("@reboot", "is none of @hourly", "@daily"),
        ("0 0 * * *" + " " * 10_000, "is longer than 200 characters", "0 3 * * *"),
    ],
)
def test_an_invalid_expression_has_a_reason_and_a_valid_one_instead(cron: str, reason: str, instead: str) -> None:
    with pytest.raises(CronError) as caught:
        parse_cron(cron)
    assert reason in str(caught.value)
    assert caught.value.instead == instead
    parse_cron(instead)


def test_an_unknown_time_zone_has_the_nearest_name() -> None:
    for wrong, meant in (("Europe/Berlni", BERLIN), ("asia/tokio", "Asia/Tokyo"), ("../../etc/passwd", None)):
        with pytest.raises(CronError, match="is not a time zone") as caught:
            parse_zone(wrong)
        assert meant is None or caught.value.instead == meant
        parse_zone(caught.value.instead)


# --- changes of clocks: in Berlin, 2:00 to 3:00 does not exist on 29 March 2026, and occurs twice on 25 October


def test_a_time_that_is_skipped_fires_once_when_the_clocks_change() -> None:
    assert fires("30 2 * * *", BERLIN, "2026-03-28T12:00", 2) == ["03-29 01:00", "03-30 00:30"]
    assert fires("0,30 2 * * *", BERLIN, "2026-03-29T00:00", 2) == ["03-29 01:00", "03-30 00:00"]


def test_a_time_that_occurs_twice_fires_at_its_first_occurrence() -> None:
    assert fires("30 2 * * *", BERLIN, "2026-10-24T12:00", 2) == ["10-25 00:30", "10-26 01:30"]
    assert fires("30 2 * * *", BERLIN, "2026-10-25T00:30", 1) == ["10-26 01:30"]


def test_an_expression_that_starts_with_a_star_follows_real_time() -> None:
    assert fires("0 * * * *", BERLIN, "2026-10-24T23:30", 4) == [
        "10-25 00:00",
        "10-25 01:00",
        "10-25 02:00",
        "10-25 03:00",
    ]
    assert fires("*/30 * * * *", BERLIN, "2026-03-29T00:15", 3) == ["03-29 00:30", "03-29 01:00", "03-29 01:30"]
    assert fires("*/30 2 * * *", BERLIN, "2026-03-29T00:00", 1) == ["03-30 00:00"]


def test_a_day_that_a_zone_skips_fires_when_the_day_changes() -> None:
    """Samoa left out 30 December 2011: its midnight is the moment at which the 31st begins."""
    assert fires("0 0 30 12 *", "Pacific/Apia", "2011-12-01T00:00", 1) == ["12-30 10:00"]


@given(
    st.tuples(
        st.sampled_from(["*", "*/7", "0", "13,44", "5-9", "58"]),
        st.sampled_from(["*", "*/5", "0", "2", "1-3", "23"]),
        st.sampled_from(["*", "1", "*/9", "25-31"]),
        st.sampled_from(["*", "3", "10,11"]),
        st.sampled_from(["*", "sun", "1-5"]),
    ),
    st.sampled_from(["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]),
    st.integers(ms("2025-01-01T00:00"), ms("2027-12-31T00:00")),
)
def test_fire_times_are_the_minutes_that_match(parts: tuple[str, ...], zone: str, after_ms: int) -> None:
    """Compared with a search minute by minute, in UTC; expressions that follow real time have no exceptions to it."""
    cron = " ".join(parts)
    found = next_fire(cron, zone, after_ms)
    assert found > after_ms
    assert found == next_fire(cron, zone, found - 1)
    parsed, tz = parse_cron(cron), ZoneInfo(zone)
    start = datetime.fromtimestamp(after_ms // 60_000 * 60, UTC) + timedelta(minutes=1)
    end = datetime.fromtimestamp(found / 1000, UTC)
    if parsed.follows_real_time:
        local = end.astimezone(tz)
        assert (local.minute in parsed.minutes, local.hour in parsed.hours, parsed.matches(local.date())) == (True,) * 3
    if end - start > timedelta(days=3):
        start = end - timedelta(days=3)
    for minute in itertools.takewhile(
        lambda time: time < end, (start + timedelta(minutes=n) for n in itertools.count())
    ):
        local = minute.astimezone(tz)
        is_match = local.minute in parsed.minutes and local.hour in parsed.hours and parsed.matches(local.date())
        assert not is_match or (local.fold == 1 and not parsed.follows_real_time)


# --- schedules in a store


def schedule_of(cron: str, next_ms: int) -> Schedule:
    return Schedule("report", cron, BERLIN, JobSpec("", "tasks:report", queue="reports"), next_ms)


def exchange(store: MemoryStore, worker: str) -> int:
    """One exchange of a worker with the store; returns the number of jobs that it submitted."""
    reply = store.exchange(Exchange(worker, claim=Claim(0, free_of(CPU_NODE), ("default",))))
    fired = [fire_schedule(store, schedule, reply.now_ms) for schedule in reply.due_schedules]
    return sum(receipt is not None for receipt in fired)


def test_two_workers_fire_each_of_a_thousand_times_once() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    store.put_schedule(schedule_of("0 * * * *", next_fire("0 * * * *", BERLIN, clock.now_ms)))
    for _ in range(1000):
        [schedule] = store.schedules()
        clock.now_ms = schedule.next_ms
        replies = [
            store.exchange(Exchange(worker, claim=Claim(0, free_of(CPU_NODE), ("default",)))) for worker in ("w1", "w2")
        ]
        receipts = [fire_schedule(store, reply.due_schedules[0], reply.now_ms) for reply in replies]
        assert [receipt is not None and receipt.created for receipt in receipts] == [True, False]
        assert exchange(store, "w1") == 0
    jobs = store.find(JobFilter(schedule="report"), 2000).jobs
    times = sorted(int(str(job.spec.options["fire_ms"])) for job in jobs)
    assert len(times) == len(set(times)) == 1000
    assert times == list(range(times[0], times[0] + 1000 * 3_600_000, 3_600_000))


def test_missed_times_are_caught_up_by_one_job() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    first = next_fire("*/5 * * * *", BERLIN, clock.now_ms)
    store.put_schedule(schedule_of("*/5 * * * *", first))
    clock.advance(86_400_000)
    assert (exchange(store, "w1"), exchange(store, "w2")) == (1, 0)
    [schedule] = store.schedules()
    assert clock.now_ms < schedule.next_ms <= clock.now_ms + 300_000
    clock.now_ms = schedule.next_ms
    assert exchange(store, "w2") == 1


def test_the_job_of_a_fire_time_has_its_own_id_and_a_key() -> None:
    schedule = schedule_of("0 3 * * *", 0)
    job, other = job_of(schedule, 3_600_000), job_of(schedule, 7_200_000, new_job_id())
    assert (job.key, job.schedule, job.queue) == ("schedule:report:3600000", "report", "reports")
    assert job.id != other.id
    assert job.key != other.key
