"""Advice for stages that use more than they requested."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.observe.resource_advice import Adviser, WrittenRequest, overuse_texts
from dovetail.observe.telemetry import UnitUse
from dovetail.resources.resources import Resources

GB = 1 << 30


def caption(cpus: float | None = None, peak: float = 0, least: float | None = None) -> UnitUse:
    return UnitUse(
        unit="caption",
        workers=1,
        cpus_now=cpus,
        cpus=cpus,
        cpus_recent=cpus,
        cpus_least=cpus if least is None else least,
        cpu_s_total=0.0,
        uss_bytes=0,
        peak_bytes=int(peak),
        read_bytes_total=0,
        write_bytes_total=0,
        gpu_peak_bytes=None,
    )


def test_more_cpus_than_requested_give_advice_with_the_new_request() -> None:
    (text,) = overuse_texts(caption(3.1), WrittenRequest(cpus=1))
    assert text == "stage caption uses 3.1 CPUs per worker and requests 1: Resources(cpus=3)"


@pytest.mark.parametrize(("asked", "used"), [(1, 1.5), (0, 0.25), (4, 5.25), (0.5, 0.8), (8, 8), (2, None)])
def test_a_little_more_than_asked_for_is_noise(asked: float, used: float | None) -> None:
    assert overuse_texts(caption(used), WrittenRequest(asked)) == []


def test_it_must_be_more_in_every_sample_not_only_on_average() -> None:
    assert overuse_texts(caption(3.1, least=1.4), WrittenRequest(1)) == []
    assert len(overuse_texts(caption(3.1, least=1.6), WrittenRequest(1))) == 1


def test_more_memory_than_requested_gives_advice_with_the_new_request() -> None:
    (text,) = overuse_texts(caption(peak=3.2 * GB), WrittenRequest(1, GB))
    assert text == 'stage caption: peak memory 3.2GB per worker, requested 1GB: Resources(memory="4GB")'
    assert overuse_texts(caption(peak=3.2 * GB), WrittenRequest(1, 4 * GB)) == []
    assert overuse_texts(caption(peak=3.2 * GB), WrittenRequest(1)) == []


def test_advice_for_a_gang_is_per_rank() -> None:
    cpus, memory = overuse_texts(caption(12.0, peak=8 * GB), WrittenRequest(1, GB, ranks=4))
    assert cpus == "stage caption uses 3 CPUs per rank and requests 1: Resources(cpus=3)"
    assert memory == 'stage caption: peak memory 2GB per rank, requested 1GB: Resources(memory="2.5GB")'
    assert overuse_texts(caption(6.0), WrittenRequest(1, ranks=4)) == []


@pytest.mark.parametrize("used", [0.3, 0.6, 1.26, 1.7, 3.9, 4.4, 17.6, 130.0])
@pytest.mark.parametrize("peak", [1.0, 2e6, 9e8, 1.1e9, 5e9, 3e11])
def test_what_is_advised_can_be_pasted_and_silences_the_advice(used: float, peak: float) -> None:
    texts = overuse_texts(caption(used, peak), WrittenRequest(0, 0))
    written: dict[str, Any] = {}
    for text in texts:
        found = eval(text.rpartition(": ")[2], {"Resources": Resources})
        written |= {"cpus": found.cpus} if "CPUs" in text else {"memory": found.memory}
    shape = Resources(**written).shape()
    assert overuse_texts(caption(used, peak), WrittenRequest(shape.cpu_milli / 1000, shape.memory_bytes)) == []


def test_advice_is_repeated_only_when_the_use_has_doubled() -> None:
    adviser, asked = Adviser(), WrittenRequest(1, GB)
    assert [it.about for it in adviser.new_advice(caption(3.0), asked)] == ["cpus"]
    assert adviser.new_advice(caption(5.9), asked) == []
    assert [it.about for it in adviser.new_advice(caption(3.0, 2 * GB), asked)] == ["memory"]
    assert [it.about for it in adviser.new_advice(caption(6.0, 3 * GB), asked)] == ["cpus"]
    assert adviser.new_advice(caption(6.0, 3 * GB), asked) == []
    assert [it.used for it in adviser.new_advice(caption(6.0, 4 * GB), asked)] == [4 * GB]
