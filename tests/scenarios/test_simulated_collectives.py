"""Collectives on the simulated device last as NCCL's do: all ranks' kernels end together.

The early rank's kernel lasts longer by as much as the other is late. The same is checked of kernels in a
public trace, whose lateness the simulated ranks then have.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from benchmarks.simulated_device.device import EXCHANGE_S, MESSAGE_S
from tests.scenarios import simulated_collective_ranks
from tests.support.node import Node, import_path, torchrun

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kernel:
    """A collective on one rank, in seconds."""

    began: float
    lasted: float

    @property
    def ended(self) -> float:
        return self.began + self.lasted


def _microseconds(*pairs: tuple[tuple[float, float], tuple[float, float]]) -> list[tuple[Kernel, Kernel]]:
    return [
        (Kernel(first[0] / 1e6, first[1] / 1e6), Kernel(second[0] / 1e6, second[1] / 1e6))
        for first, second in pairs
    ]


PUBLIC = _microseconds(
    ((0, 62783), (4859, 57924)),
    ((170610, 11727), (173912, 8370)),
    ((460269, 42496), (460353, 42744)),
    ((1021275, 36158), (1043603, 13838)),
    ((1060838, 63644), (1062130, 62163)),
)
"""The NCCL kernels that are in the traces of both ranks 0 and 1, of 128, that come with HTA
(facebookresearch/HolisticTraceAnalysis, tests/data/trace_filter): when each began on either rank, and for how
long it lasted."""


def check_that_all_end_together(kernels: list[tuple[Kernel, Kernel]], tolerance: float) -> None:
    """Check pairs of kernels against the lateness of the second rank, in seconds."""
    for first, second in kernels:
        assert first.ended == pytest.approx(second.ended, abs=tolerance)
        late = second.began - first.began
        assert first.lasted - second.lasted == pytest.approx(late, abs=tolerance)


def test_kernels_of_a_public_trace_end_together() -> None:
    check_that_all_end_together(PUBLIC, tolerance=0.0004)
    assert max(first.lasted / second.lasted for first, second in PUBLIC) > 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two simulated ranks measure, the second of which is as late as in the public trace."""
    directory = tmp_path_factory.mktemp("ranks")
    lateness = ",".join(str(second.began - first.began) for first, second in PUBLIC)
    command = [
        *torchrun(2),
        *(simulated_collective_ranks.__file__, str(directory), lateness),
    ]
    node = Node()
    try:
        with node.running(*command, PYTHONPATH=import_path()) as process:
            _, errors = process.communicate(timeout=300)
    finally:
        node.close()
    assert process.returncode == 0, errors
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def simulated(measured: list[dict[str, Any]]) -> list[tuple[Kernel, Kernel]]:
    """Their collectives."""
    first, second = ([Kernel(*each) for each in rank["collectives"]] for rank in measured)
    return [*zip(first, second, strict=True)]


def test_simulated_kernels_end_together(simulated: list[tuple[Kernel, Kernel]]) -> None:
    check_that_all_end_together(simulated, tolerance=1e-6)


def test_the_last_simulated_rank_has_the_exchange_alone(simulated: list[tuple[Kernel, Kernel]]) -> None:
    for first, second in simulated:
        assert min(first.lasted, second.lasted) == pytest.approx(EXCHANGE_S, abs=1e-6)


def test_messages_end_when_both_ranks_have_come(measured: list[dict[str, Any]]) -> None:
    for first, second in zip(measured[0]["messages"], measured[1]["messages"], strict=True):
        (arrived, ended, was_ahead), (other_arrived, other_ended, other_was_ahead) = first, second
        assert was_ahead
        assert other_was_ahead
        last = max(arrived, other_arrived)
        assert [ended, other_ended] == pytest.approx([last + MESSAGE_S] * 2, abs=1e-6)


def test_what_only_sets_a_job_up_is_sent_for_real(measured: list[dict[str, Any]]) -> None:
    assert [rank["number"] for rank in measured] == [7, 7]
