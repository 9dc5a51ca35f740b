"""Resident memory of a rank's process: read from the kernel, and shown in the tables of ranks."""

from pathlib import Path

import pytest

from torchperfd.model.process import HostMemory, read_host_memory
from torchperfd.report import RankReport
from torchperfd.report.overview import render_overview
from torchperfd.steps.phases import BACKWARD, PhaseNames
from torchperfd.steps.totals import KindTotals, PhaseTotals, Totals

MS = 10**6


def report(rank: int, memory: HostMemory | None) -> RankReport:
    train = KindTotals(steps=10, ns=100 * MS)
    train.phases[BACKWARD] = PhaseTotals(10, 100 * MS)
    return RankReport(rank, Totals(train=train, host_memory=memory), PhaseNames())


def test_host_memory_of_this_process_is_read() -> None:
    memory = read_host_memory()
    assert memory is not None
    assert 0 < memory.resident_bytes <= memory.peak_bytes


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", HostMemory(1 << 20, 2 << 20)),
        # The kernel counts both by thread and may be behind.
        ("VmHWM:\t1023 kB\nVmRSS:\t1024 kB\n", HostMemory(1 << 20, 1 << 20)),
        ("VmHWM:\t1024 kB\n", None),
        ("VmHWM:\nVmRSS:\n", None),
        ("VmHWM:\tx kB\nVmRSS:\ty kB\n", None),
        (None, None),
    ],
)
def test_host_memory_is_read_or_unknown(
    tmp_path: Path, status: str | None, expected: HostMemory | None
) -> None:
    if status is not None:
        (tmp_path / "status").write_text(status)
    assert read_host_memory(str(tmp_path / "status")) == expected


def test_overview_has_the_memory_of_each_rank() -> None:
    memory = HostMemory(441 << 20, 1398 << 20)
    lines = render_overview([report(0, memory), report(1, None)], {}).splitlines()
    assert lines[1].endswith("RSS / peak")
    assert lines[2].endswith("441 MiB / 1.37 GiB")
    assert lines[3].endswith("  -")
    assert max(map(len, lines)) <= 80


def test_overview_of_one_rank_has_its_memory() -> None:
    memory = HostMemory(441 << 20, 1398 << 20)
    assert "memory 441 MiB resident, 1.37 GiB at the peak" in render_overview([report(0, memory)], {})
    assert "memory: 441 MiB resident · 1.37 GiB at the peak" in report(0, memory).to_text()
