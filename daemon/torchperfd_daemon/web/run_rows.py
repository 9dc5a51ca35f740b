"""What the live page shows of a run beside ``torchperfd ps --json``: its state, rates, verdict and GPUs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from torchperfd.v1 import control_pb2
from torchperfd_daemon.store import Rank, RankIdentity, Totals
from torchperfd_daemon.views import live
from torchperfd_daemon.views.history import sparkline
from torchperfd_daemon.views.runs import run_dict

GpuOf = Callable[[RankIdentity], str]
"""Returns the index of a rank's GPU on this node; empty if it is not known."""

_STATES: Final = (
    live.STALLED,
    live.STOPPED,
    "training",
    "validating",
    "checkpointing",
    "starting",
    "finished",
    "gone",
)


def run_state(statuses: Sequence[control_pb2.RankStatus]) -> str:
    """Return the state of a run: the first in the order of attention that one of its ranks is in."""
    return most_urgent({live.state(status) for status in statuses})


def most_urgent(states: Collection[str]) -> str:
    """Return the state of a run by those of its ranks."""
    return next((state for state in _STATES if state in states), "starting")


def run_row(run: control_pb2.Run, ranks: Sequence[Rank], gpu_of: GpuOf) -> dict[str, Any]:
    """Return a run with its ranks.

    Args:
        ranks: Those of this node, whose data is beyond that of the message.
    """
    here = {rank.identity.rank: rank for rank in ranks}
    row = run_dict(run)
    for own, status in zip(row["ranks"], run.ranks, strict=True):
        rank = here.get(status.identity.rank)
        if rank is not None and rank.identity.node == status.identity.node:
            own.update(_rank_more(rank, gpu_of))
    steps = [status.step_seconds for status in run.ranks if status.connected and status.step_seconds]
    slowest = max(steps, default=0.0)
    samples = [value for own in row["ranks"] if own["connected"] and (value := own.get("samples_per_second"))]
    row.update(
        state=run_state(run.ranks),
        step_seconds=slowest or None,
        steps_per_second=1 / slowest if slowest else None,
        samples_per_second=sum(samples) if samples else None,
        sparkline=sparkline(ranks) if ranks else None,
        gpus=sorted({gpu for own in row["ranks"] if (gpu := own.get("gpu"))}),
    )
    return row


def samples_per_step(totals: Totals) -> float | None:
    """Return the mean number of samples of a training step; None where samples are not counted."""
    steps = totals.train.steps
    return totals.train.samples / steps if steps and totals.train.samples else None


def _rank_more(rank: Rank, gpu_of: GpuOf) -> Mapping[str, Any]:
    totals, step = rank.totals, rank.mean_step_seconds()
    samples = samples_per_step(totals)
    cuda, loader = totals.cuda, totals.loader
    return {
        "world_size": rank.identity.world_size,
        "framework": rank.framework or None,
        "gpu": gpu_of(rank.identity) or None,
        "samples_per_second": samples / step if samples and step else None,
        "cuda": None
        if cuda is None
        else {
            "allocated_bytes": cuda.allocated,
            "reserved_bytes": cuda.reserved,
            "peak_bytes": cuda.peak,
        },
        "loader": None if loader is None else {"workers": loader.workers, "ready": totals.loader_ready},
    }
