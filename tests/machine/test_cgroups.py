"""CPU affinity and cgroup limits of both versions; invalid files are ignored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.machine import cgroups
from dovetail.machine.cgroups import parse_cpu_quota, parse_memory_limit, usable_cpu_milli, usable_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 2**30
UNLIMITED_V1 = b"9223372036854771712\n"


@pytest.fixture(autouse=True, scope="module")
def big_machine() -> Iterator[None]:
    """64 CPUs and 256 GiB, all of them allowed by the affinity."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 64)
        patch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
        patch.setattr(cgroups, "physical_bytes", lambda: 256 * GIB)
        yield


def tree(root: Path, cgroup: bytes, files: dict[str, bytes]) -> Path:
    """A fake root: what /proc/self/cgroup says, and files under /sys/fs/cgroup."""
    for path, content in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return root


def test_without_limits_everything_is_usable_and_nothing_is_noted(tmp_path: Path) -> None:
    assert usable_cpu_milli(tmp_path) == (64_000, [])
    assert usable_memory_bytes(tmp_path) == (256 * GIB, [])


def test_affinity_limits_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 8})
    assert usable_cpu_milli(tmp_path) == (3000, ["CPU affinity: 3 of 64 CPUs"])


def test_a_system_without_affinity_uses_all_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpu_milli(tmp_path) == (64_000, [])


def test_a_system_that_does_not_count_its_cpus_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpu_milli(tmp_path) == (1000, [])


def test_version_2_limits_are_read_from_the_own_cgroup(tmp_path: Path) -> None:
    own = "user.slice/job"
    root = tree(
        tmp_path,
        b"0::/user.slice/job\n",
        {f"{own}/cpu.max": b"250000 100000\n", f"{own}/memory.max": b"8589934592\n"},
    )
    assert usable_cpu_milli(root) == (2500, ["CPU quota of the cgroup: 2.5 of 64 CPUs"])
    assert usable_memory_bytes(root) == (8 * GIB, ["memory limit of the cgroup: 8.0 of 256.0 GiB"])


@pytest.mark.parametrize("tight", ["cpu.max", "a/cpu.max", "a/b/cpu.max"])
def test_the_tightest_cgroup_on_the_way_up_wins(tmp_path: Path, tight: str) -> None:
    loose = dict.fromkeys(["cpu.max", "a/cpu.max", "a/b/cpu.max"], b"800000 100000\n")
    root = tree(tmp_path, b"0::/a/b\n", {**loose, tight: b"100000 100000\n"})
    assert usable_cpu_milli(root)[0] == 1000


def test_the_limits_of_a_sibling_do_not_count(tmp_path: Path) -> None:
    root = tree(tmp_path, b"0::/a\n", {"a/cpu.max": b"max 100000\n", "b/cpu.max": b"100000 100000\n"})
    assert usable_cpu_milli(root) == (64_000, [])


def test_max_means_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, b"0::/\n", {"cpu.max": b"max 100000\n", "memory.max": b"max\n"})
    assert usable_cpu_milli(root) == (64_000, [])
    assert usable_memory_bytes(root) == (256 * GIB, [])


def test_version_1_limits_are_read_from_the_own_cgroup(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        b"5:cpu,cpuacct:/job\n4:memory:/mem\n1:name=systemd:/\n",
        {
            "cpu/job/cpu.cfs_quota_us": b"150000\n",
            "cpu/job/cpu.cfs_period_us": b"50000\n",
            "memory/mem/memory.limit_in_bytes": b"1073741824\n",
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert usable_cpu_milli(root) == (3000, ["CPU quota of the cgroup: 3 of 64 CPUs"])
    assert usable_memory_bytes(root) == (GIB, ["memory limit of the cgroup: 1.0 of 256.0 GiB"])


def test_version_1_writes_no_limit_as_minus_one_and_as_a_huge_number(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        b"2:cpu:/\n1:memory:/\n",
        {
            "cpu/cpu.cfs_quota_us": b"-1\n",
            "cpu/cpu.cfs_period_us": b"100000\n",
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert usable_cpu_milli(root) == (64_000, [])
    assert usable_memory_bytes(root) == (256 * GIB, [])


def test_a_quota_without_its_period_is_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, b"2:cpu:/\n", {"cpu/cpu.cfs_quota_us": b"100000\n"})
    assert usable_cpu_milli(root) == (64_000, [])


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (b"0::/kubepods/pod1/c1\n", {"cpu.max": b"200000 100000\n", "memory.max": b"1073741824\n"}),
        (b"0::/../../elsewhere\n", {"cpu.max": b"200000 100000\n", "memory.max": b"1073741824\n"}),
        (
            b"3:cpu,cpuacct:/docker/c1\n2:memory:/docker/c1\n0::/system.slice\n",
            {
                "cpu/cpu.cfs_quota_us": b"200000\n",
                "cpu/cpu.cfs_period_us": b"100000\n",
                "memory/memory.limit_in_bytes": b"1073741824\n",
            },
        ),
    ],
    ids=["v2 with the path on the host", "v2 outside of the namespace", "v1 with the path on the host"],
)
def test_a_container_finds_its_limit_at_the_root(tmp_path: Path, cgroup: bytes, files: dict[str, bytes]) -> None:
    root = tree(tmp_path, cgroup, files)
    assert usable_cpu_milli(root)[0] == 2000
    assert usable_memory_bytes(root)[0] == GIB


def test_a_path_that_leaves_the_mount_is_not_followed(tmp_path: Path) -> None:
    root = tree(tmp_path, b"0::/../other\n", {"cpu.max": b"max 100000\n"})
    (tmp_path / "sys/fs/other").mkdir()
    (tmp_path / "sys/fs/other/cpu.max").write_bytes(b"100000 100000\n")
    assert usable_cpu_milli(root) == (64_000, [])


def test_a_machine_with_both_versions_is_read_in_both(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        b"4:memory:/\n0::/job\n",
        {"unified/job/cpu.max": b"100000 100000\n", "memory/memory.limit_in_bytes": b"1073741824\n"},
    )
    assert usable_cpu_milli(root)[0] == 1000
    assert usable_memory_bytes(root)[0] == GIB


def test_a_missing_list_of_cgroups_still_leaves_the_root(tmp_path: Path) -> None:
    root = tree(tmp_path, b"", {"cpu.max": b"100000 100000\n"})
    (tmp_path / "proc/self/cgroup").unlink()
    assert usable_cpu_milli(root)[0] == 1000


def test_a_quota_above_the_affinity_is_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    root = tree(tmp_path, b"0::/\n", {"cpu.max": b"400000 100000\n"})
    assert usable_cpu_milli(root) == (2000, ["CPU affinity: 2 of 64 CPUs"])


def test_a_malformed_file_is_no_limit_and_is_noted(tmp_path: Path) -> None:
    root = tree(tmp_path, b"0::/a\n", {"a/cpu.max": b"lots\n", "cpu.max": b"100000 100000\n", "memory.max": b"\xff\n"})
    milli, cpu_notes = usable_cpu_milli(root)
    size, memory_notes = usable_memory_bytes(root)
    assert (milli, size) == (1000, 256 * GIB)
    assert cpu_notes[0].endswith("a/cpu.max' is malformed (b'lots\\n'): taken as no limit")
    assert memory_notes[0].endswith("memory.max' is malformed (b'\\xff\\n'): taken as no limit")


def test_an_unreadable_file_is_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, b"0::/\n", {"cpu.max/not-a-file": b""})
    assert usable_cpu_milli(root) == (64_000, [])


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b"0 100000", b"100000 0", b"100000", b"1_0 5", b"1 2 3", b"-5 10", b"\xb2 1"]
)
def test_a_malformed_quota_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_cpu_quota(raw)


@pytest.mark.parametrize("raw", [b"", b"0", b"-5", b"1 2", b"1e9", b"\xff", b"9" * 5000])
def test_a_malformed_memory_limit_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_memory_limit(raw)


def test_the_smallest_quota_is_not_rounded_to_nothing() -> None:
    assert parse_cpu_quota(b"1 1000000") == 1


@given(quota=st.integers(1, 10**7), period=st.integers(1000, 10**6))
def test_a_quota_is_never_rounded_up_by_more_than_the_floor_of_one(quota: int, period: int) -> None:
    milli = parse_cpu_quota(b"%d %d\n" % (quota, period))
    assert milli is not None
    assert milli == 1 or milli * period <= quota * 1000 < (milli + 1) * period


RUBBISH = st.binary(max_size=60) | st.sampled_from([b"max", b"0::/\x00", b"0::/" + b"x" * 300, b"1:cpu", b"9" * 5000])


@given(cgroup=RUBBISH, content=RUBBISH)
@example(cgroup=b"0::/\xff\xfe", content=b"\xff\xfe")
def test_invalid_files_never_raise_and_never_exceed_the_machine(
    tmp_path_factory: pytest.TempPathFactory, cgroup: bytes, content: bytes
) -> None:
    names = ["cpu.max", "memory.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us", "memory/memory.limit_in_bytes"]
    root = tree(tmp_path_factory.getbasetemp() / "rubbish", cgroup, dict.fromkeys(names, content))
    milli, cpu_notes = usable_cpu_milli(root)
    size, memory_notes = usable_memory_bytes(root)
    assert 1 <= milli <= 64_000
    assert 1 <= size <= 256 * GIB
    assert all(note.isascii() for note in cpu_notes + memory_notes)


def test_the_limit_of_a_cgroup_whose_name_is_not_text_is_found(tmp_path: Path) -> None:
    folder = os.fsdecode(b"job-\xff")
    root = tree(tmp_path, b"0::/job-\xff\n", {f"{folder}/cpu.max": b"100000 100000\n", f"{folder}/memory.max": b"?"})
    assert usable_cpu_milli(root)[0] == 1000
    assert usable_memory_bytes(root)[1][0].isascii()
