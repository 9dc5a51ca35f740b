"""What ``compare --lake`` needs of a run: a few parts of its report, as JSON in its row.

Blocks of steps are summed over the ranks of the node. That is all that a comparison needs of them, and a node
of eight ranks takes as many bytes as one of one. Names of scripts and lines are left out.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from torchperfd.v1 import session_pb2
from torchperfd_daemon.diagnosis.verdict import Verdict, public_summary
from torchperfd_daemon.store.model import KindTotal
from torchperfd_daemon.store.store import Rank

_WAITING: Final = "collective_wait"
_SUM_DIGITS: Final = 9

_Blocks = dict[str, NDArray[np.float64]]
"""Mean seconds of a step by block: of the step under an empty name, and of each phase."""


def report_of(ranks: Sequence[Rank], verdict: Verdict, device: str = "") -> str:
    """Return the parts of a run's report as JSON, with the names that ``torchperfd.run/1`` has for them.

    ``cpus`` are those that a rank may use.
    """
    first = min(ranks, key=lambda rank: rank.identity.rank)
    environment = {
        "cpus": _whole(first.totals.cpus),
        "threads": first.totals.threads,
        "device": device or None,
    }
    document = {
        "host": first.identity.node,
        "environment": {name: value for name, value in environment.items() if value is not None},
        "summary": public_summary(verdict),
        "account": verdict.account.to_document() if verdict.account is not None else None,
        "ranks": _ranks(ranks),
    }
    return json.dumps(document, separators=(",", ":"))


def _ranks(ranks: Iterable[Rank]) -> list[dict[str, Any]]:
    ordered = sorted(ranks, key=lambda rank: rank.identity.rank)
    alike: dict[int, dict[int, _Blocks]] = defaultdict(dict)
    for rank in ordered:
        steps, blocks = _blocks(rank.totals.step_blocks)
        if blocks:
            alike[steps][rank.identity.rank] = blocks
    # Those of all ranks whose blocks are as long are with the first of them.
    summed = {min(of_ranks): _summed(steps, list(of_ranks.values())) for steps, of_ranks in alike.items()}
    return [
        {
            "rank": rank.identity.rank,
            "train": _kind(rank.totals.train),
            "warmup": _kind(rank.totals.warmup),
            "blocks": summed.get(rank.identity.rank),
        }
        for rank in ordered
    ]


def _kind(kind: KindTotal) -> dict[str, Any]:
    waiting = kind.phases.get(_WAITING)
    return {
        "steps": kind.steps,
        "step_seconds_total": kind.ns / 1e9,
        "phases": {_WAITING: {"seconds_total": waiting.ns / 1e9}} if waiting is not None else {},
    }


def _blocks(message: bytes) -> tuple[int, _Blocks]:
    """Return how many steps a block has, and the blocks; none where they are missing or damaged."""
    packed = session_pb2.StepBlocks()
    try:
        packed.ParseFromString(message)
        columns = {"": packed.step_ns, **{phase.phase: phase.ns for phase in packed.phases}}
        ns = {name: np.frombuffer(column, "<i8") for name, column in columns.items()}
    except (DecodeError, ValueError):
        return 0, {}
    count = len(ns[""])
    if not packed.steps or not count or any(len(each) != count or min(each) < 0 for each in ns.values()):
        return 0, {}
    return packed.steps, {name: _means(column, packed.steps) for name, column in ns.items()}


def _means(ns: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
    """Return the means of blocks with the five digits that reports have of each rank."""
    return np.array([float(f"{each / steps / 1e9:.5g}") for each in ns.tolist()])


def _summed(steps: int, blocks: Sequence[_Blocks]) -> dict[str, Any]:
    count = min(len(each[""]) for each in blocks)
    names = dict.fromkeys(name for each in blocks for name in each)
    none = np.zeros(count)
    columns = {
        name: np.sum([each.get(name, none)[:count] for each in blocks], axis=0).tolist() for name in names
    }
    # Sums of few digits have few digits, too, once the error of adding is rounded away.
    rounded = {name: [float(f"{x:.{_SUM_DIGITS}g}") for x in column] for name, column in columns.items()}
    step = rounded.pop("")
    return {"ranks": len(blocks), "steps": steps, "step_seconds": step, "phases": rounded}


def _whole(number: float | None) -> float | None:
    return int(number) if number is not None and number == int(number) else number
