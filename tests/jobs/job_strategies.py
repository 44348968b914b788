"""Hypothesis strategies for jobs."""

from __future__ import annotations

from hypothesis import strategies as st

from dovetail.jobs.job import DependencyPolicy, JobSpec, Retries
from dovetail.resources.resources import Resources

SHAPES = tuple(
    resources.shape()
    for resources in (
        Resources(cpus=1),
        Resources(cpus=3, memory="2GB"),
        Resources(cpus=1, gpus=0.5),
        Resources(cpus=1, gpus=2),
        Resources(cpus=0.5, gpu_memory="15GB"),
        Resources(cpus=1, custom={"licence": 1}),
        Resources(cpus=1, labels={"zone": "a|b"}, accelerator="a100|h100", gpus=1),
    )
)


def retries() -> st.SearchStrategy[Retries]:
    count = st.integers(0, 2)
    return st.builds(
        Retries,
        error=count,
        timeout=count,
        lost=count,
        out_of_memory=count,
        backoff_ms=st.sampled_from([0, 100, 1000]),
        max_backoff_ms=st.sampled_from([150, 10_000]),
    )


def specs() -> st.SearchStrategy[JobSpec]:
    """Specifications with any value in every field."""
    text = st.text(max_size=20).filter(lambda value: value.isprintable())
    return st.builds(
        JobSpec,
        id=text,
        function=text,
        payload=st.binary(max_size=20),
        encoding=st.sampled_from(["json", "pickle"]),
        queue=text,
        priority=st.integers(-1_000_000, 1_000_000),
        shape=st.sampled_from(SHAPES),
        retries=retries(),
        key=st.none() | text,
        after=st.lists(text, max_size=3).map(tuple),
        if_dependency_fails=st.sampled_from(DependencyPolicy),
        at_ms=st.none() | st.integers(0, 2**42),
        delay_ms=st.integers(0, 2**42),
        timeout_ms=st.none() | st.integers(1, 2**42),
        isolation=st.none() | st.sampled_from(["process", "warm_process", "thread", "async"]),
        schedule=st.none() | text,
        options=st.dictionaries(text, st.none() | st.integers() | text, max_size=3),
    )
