"""Metrics of queues and workers as Prometheus text."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dovetail.jobs.job import JobState
from dovetail.jobs.metrics import COUNTER, GAUGE, Family, metrics_text, render
from dovetail.jobs.store import QueueStats, WorkerInfo
from dovetail.resources.shape import Shape, ShapeKind

GPU = Shape(ShapeKind.ENTIRE_GPU, cpu_milli=4000, cards=1, gpu_milli=1000)
STATUS = {"worker_id": "w-1", "active_jobs": 2, "available_slots": 6, "gpu_enabled": True, "totals": {"succeeded": 5}}
STATS = [
    QueueStats(
        "default", {JobState.READY: 3, JobState.LEASED: 2}, False, 10_000, {GPU: 1, Shape(ShapeKind.CPU_ONLY): 2}
    ),
    QueueStats('odd "name"\n\\', {}, True, None, {}),
]
WORKERS = [
    WorkerInfo("w-1", ("default", "gpu"), slots=8, heartbeat_ms=69_000, leases=2),
    WorkerInfo("w-2", ("default",), slots=4, heartbeat_ms=69_000, leases=1),
    WorkerInfo("gone", ("default",), slots=100, heartbeat_ms=1_000, leases=0),
]


def parsed(text: str) -> dict[str, float]:
    """Samples by name and labels; every line is a sample or a comment."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# (HELP|TYPE) dovetail_[a-z_]+ .+", line), line
            continue
        sample = re.fullmatch(
            r'(dovetail_[a-z_]+(?:\{\w+="(?:[^"\\]|\\.)*"(?:,\w+="(?:[^"\\]|\\.)*")*\})?) (\S+)', line
        )
        assert sample, line
        assert sample[1] not in found
        found[sample[1]] = float(sample[2])
    return found


def test_queues_and_workers_have_samples() -> None:
    found = parsed(metrics_text(STATUS, STATS, WORKERS, now_ms=70_000))
    assert found['dovetail_jobs{queue="default",state="ready"}'] == 3
    assert found['dovetail_jobs{queue="default",state="dead"}'] == 0
    assert found['dovetail_queue_oldest_ready_seconds{queue="default"}'] == 60
    assert found['dovetail_queue_ready_jobs{queue="default",needs="one slot"}'] == 2
    assert found['dovetail_queue_ready_jobs{queue="default",needs="1 entire GPU, 4 CPUs"}'] == 1
    assert found['dovetail_queue_paused{queue="odd \\"name\\"\\n\\\\"}'] == 1
    assert found['dovetail_workers{queue="default"}'] == 2, "a worker that is gone is not counted"
    assert found['dovetail_workers_slots{queue="default"}'] == 12
    assert found['dovetail_workers_jobs{queue="gpu"}'] == 2
    assert found['dovetail_worker_active_jobs{worker="w-1"}'] == 2
    assert found['dovetail_worker_gpu_enabled{worker="w-1"}'] == 1
    assert found['dovetail_worker_attempts_total{worker="w-1",outcome="succeeded"}'] == 5
    assert found["dovetail_store_reachable"] == 1


def test_metrics_of_the_worker_remain_while_the_store_is_away() -> None:
    found = parsed(metrics_text(STATUS, None))
    assert found["dovetail_store_reachable"] == 0
    assert found['dovetail_worker_active_jobs{worker="w-1"}'] == 2
    assert not [name for name in found if name.startswith("dovetail_jobs")]


def test_a_family_without_samples_is_left_out_and_others_can_be_added() -> None:
    more = [Family("empty", GAUGE, "None.", ()), Family("work_seconds", COUNTER, "Text.", (({"class": "gpu"}, 1.5),))]
    found = parsed(metrics_text({}, [], more=more))
    assert found == {"dovetail_store_reachable": 1, 'dovetail_work_seconds{class="gpu"}': 1.5}


@given(st.lists(st.tuples(st.text(), st.floats()), max_size=3, unique_by=lambda it: it[0]))
def test_any_label_and_value_is_one_line(samples: list[tuple[str, float]]) -> None:
    text = render([Family("any", GAUGE, "Any\nvalue.", tuple(({"label": label}, value) for label, value in samples))])
    assert len(text.split("\n")) == (0 if not samples else 2) + len(samples) + 1
