"""The part of a machine that the process of a job has."""

from __future__ import annotations

from dovetail.machine.inventory import read_machine
from dovetail.machine.job_seat import SEAT_VARIABLE, JobSeat, job_seat

SEAT = JobSeat(1500, 3 << 30, ((500, 1 << 30, 0, 0),), (("licence", 1000),))


def test_a_seat_is_read_as_it_was_written() -> None:
    assert job_seat({SEAT_VARIABLE: SEAT.to_text()}) == SEAT
    assert job_seat({}) is None


def test_a_job_has_its_part_of_the_machine() -> None:
    whole, part = read_machine(environ={}), read_machine(environ={SEAT_VARIABLE: SEAT.to_text()})
    assert (part.cpu_milli, part.memory_bytes, part.custom) == (1500, 3 << 30, (("licence", 1000),))
    assert whole.custom == ()
    assert set(part.notes) - set(whole.notes) == {
        "this process belongs to a job: CPUs, memory and GPUs are those of the job"
    }
