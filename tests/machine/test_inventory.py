"""Inventory of this machine: all parts in one reading."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import dovetail.machine
from dovetail.machine import CardFacts, MachineFacts, read_machine
from dovetail.machine.gpus import NvmlReader
from scripted_nvml import ScriptedCard, ScriptedNvml

if TYPE_CHECKING:
    import pytest


class TwoCards:
    def cards(self) -> tuple[list[CardFacts], list[str]]:
        return [CardFacts("NVIDIA L4", 24 * 2**30, f"GPU-{i}", index=i) for i in range(2)], ["GPU 2 is lost: left out"]


def limited_root(root: Path) -> Path:
    for path, content in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/memory.max": "1048576\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def test_all_limits_and_notes_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr("dovetail.machine.cgroups.physical_bytes", lambda: 2**30)
    facts = read_machine(gpus=TwoCards(), environ={"CUDA_VISIBLE_DEVICES": "1"}, root=limited_root(tmp_path))
    assert facts == MachineFacts(
        hostname=socket.gethostname(),
        cpu_milli=500,
        memory_bytes=2**20,
        cards=(CardFacts("NVIDIA L4", 24 * 2**30, "GPU-1", index=1),),
        notes=(
            "CPU quota of the cgroup: 0.5 of 4 CPUs",
            "memory limit of the cgroup: 0.0 of 1.0 GiB",
            "GPU 2 is lost: left out",
            "CUDA_VISIBLE_DEVICES=1 hides 1 of 2 GPUs",
        ),
    )


def test_the_environment_of_the_process_is_used_when_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert [card.uuid for card in read_machine(gpus=TwoCards(), root=tmp_path).cards] == ["GPU-1"]


def test_an_empty_environment_is_not_replaced_by_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert len(read_machine(gpus=TwoCards(), environ={}, root=tmp_path).cards) == 2


def test_the_order_in_which_cuda_counts_is_taken_from_the_environment(tmp_path: Path) -> None:
    gpus = NvmlReader(ScriptedNvml(ScriptedCard("GPU-a", "NVIDIA L4"), ScriptedCard("GPU-b", "NVIDIA H100")))
    doubtful = read_machine(gpus=gpus, environ={"CUDA_VISIBLE_DEVICES": "1,0"}, root=tmp_path)
    settled = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    sure = read_machine(gpus=gpus, environ=settled, root=tmp_path)
    assert [card.uuid for card in doubtful.cards] == [card.uuid for card in sure.cards] == ["GPU-b", "GPU-a"]
    assert [note for note in doubtful.notes if note not in sure.notes] == [
        "CUDA_VISIBLE_DEVICES=1,0 is read in PCI order, but CUDA may number different cards in another order: "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name the cards by UUID"
    ]


def test_this_machine_can_be_read() -> None:
    facts = read_machine()
    assert 1 <= facts.cpu_milli <= (os.cpu_count() or 1) * 1000
    assert 2**20 < facts.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert len({card.uuid for card in facts.cards}) == len(facts.cards)


def test_importing_the_package_imports_neither_psutil_nor_pynvml() -> None:
    code = "import sys, dovetail.machine; print(sorted({'psutil', 'pynvml'} & set(sys.modules)))"
    source = str(Path(dovetail.machine.__file__).parents[2])
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "[]\n"


def test_the_package_exports_its_documented_names() -> None:
    assert set(dovetail.machine.__all__) == {"read_machine", "MachineFacts", "CardFacts", "GpuReader"}
    assert all(hasattr(dovetail.machine, name) for name in dovetail.machine.__all__)
