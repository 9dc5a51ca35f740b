"""Memory of the training process over time: read, kept in few values, and shown wherever people look."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from torchperfd.model.host_memory import MAX_COURSE, HostMemory, MemoryReader, read_host_memory
from torchperfd.model.totals import PhaseTotals
from torchperfd.report.rank import RankReport, run_document
from torchperfd.steps.phases import BACKWARD, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd_cli.commands._run_overview import read_overview

MIB = 1 << 20


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


def course(seconds: int, held: Callable[[int], int]) -> HostMemory:
    """Return what is known after one reading per second."""
    # The flusher's seconds are a little longer and shorter than one.
    times = iter([second + 0.02 * (second % 2) for second in range(seconds)])
    readings = iter([HostMemory(held(second), 2**40) for second in range(seconds)])
    reader = MemoryReader(lambda: next(readings), lambda: next(times))
    newest = [reader.read() for _ in range(seconds)][-1]
    assert newest is not None
    return newest


def test_short_course_has_every_reading() -> None:
    memory = course(10, lambda now: now * MIB)
    assert memory.course_bytes == tuple(now * MIB for now in range(10))
    assert memory.course_seconds == pytest.approx(9, abs=0.1)
    assert (memory.resident_bytes, memory.peak_bytes) == (9 * MIB, 2**40)


@pytest.mark.parametrize("seconds", [59, 60, 61, 500, 9000])
def test_course_spans_all_readings_in_few_values(seconds: int) -> None:
    memory = course(seconds, lambda now: (now + 1) * MIB)
    assert MAX_COURSE // 2 <= len(memory.course_bytes) <= MAX_COURSE
    assert memory.course_bytes[0] == memory.first_bytes == MIB
    assert memory.course_seconds >= 0.9 * seconds
    steps = [b - a for a, b in zip(memory.course_bytes, memory.course_bytes[1:], strict=False)]
    assert max(steps) <= 2 * min(steps)


def test_growth_is_of_the_newer_half_of_the_course() -> None:
    memory = course(200, lambda now: 100 * MIB + (10**9 if now > 20 else 0) + now * MIB // 4)
    assert memory.growth_bytes_per_second == pytest.approx(MIB / 4, rel=0.01)
    assert course(200, lambda now: 10**9 - now).growth_bytes_per_second == 0
    assert course(9, lambda now: now * MIB).growth_bytes_per_second == 0


def test_memory_that_cannot_be_read_stays_as_it_was() -> None:
    readings = [None, HostMemory(1, 2), None]
    reader = MemoryReader(lambda: readings.pop(0))
    assert reader.read() is None
    assert reader.read() == reader.read()


GROWING = HostMemory(441 * MIB, 1398 * MIB, 300 * MIB, 35_000.0, 9.5, (300 * MIB, 441 * MIB))


def report_of(memory: HostMemory) -> RankReport:
    train = KindTotals(steps=10, ns=10**9)
    train.phases[BACKWARD] = PhaseTotals(10, 10**9)
    return RankReport(0, Totals(train=train, host_memory=memory), PhaseNames())


def test_report_has_first_last_peak_and_growth() -> None:
    words = "memory: 441 MiB resident · 1.37 GiB at the peak · 300 MiB at first, growing by 2 MiB a minute"
    assert words in report_of(GROWING).to_text(200)
    steady = HostMemory(441 * MIB, 1398 * MIB, 300 * MIB, 9.0)
    assert "300 MiB at first\n" in report_of(steady).to_text(200)


def test_document_has_the_course_and_gives_it_back() -> None:
    document = run_document("bert", [report_of(GROWING)], None)
    assert document["ranks"][0]["host_memory"]["course_bytes"] == GROWING.course_bytes
    (back,) = read_overview(json.dumps(document).encode(), "a file").reports
    assert back.totals.host_memory == GROWING
    del document["ranks"][0]["host_memory"]["course_bytes"]
    (older,) = read_overview(json.dumps(document).encode(), "a file").reports
    assert older.totals.host_memory is not None
    assert older.totals.host_memory.course_bytes == ()
