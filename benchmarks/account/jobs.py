"""Jobs of the oracle: what their ranks recorded, and what each fault truly costs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from benchmarks.account.loaders import Batches, batches_of

from torchperfd_daemon.diagnosis.step_records import RankRecord

Float64 = npt.NDArray[np.float64]

UNSEEN: Final = frozenset({"slow_host", "slow_device"})
"""Faults that no record can show where all ranks have them in all steps: work that takes longer is work."""


@dataclass(frozen=True)
class Truth:
    """One fault of a job.

    Attributes:
        rank: Whose it is; None for all.
        injected: Milliseconds per step, or a factor for a slow device and for contention.
    """

    kind: str
    rank: int | None
    phase: str
    injected: float
    cost_ms: float


@dataclass(frozen=True)
class OracleJob:
    """One job, in seconds except where a name says milliseconds.

    Attributes:
        batches: How its loader makes batches; None without workers.
        collected: Garbage collections by rank and step; shape (ranks, steps).
        queued: Waits for a processor, of the same shape.
        make_seconds: What its loader takes for a batch without a fault.
    """

    seed: int
    records: list[RankRecord]
    batches: Batches | None
    collected: Float64
    queued: Float64
    make_seconds: float
    step_ms: float
    truth: list[Truth]

    def named_rank(self, truth: Truth) -> int | None:
        """Return whose a fault is; None where that is all ranks."""
        return None if len(self.records) == 1 else truth.rank

    def is_seen(self, truth: Truth) -> bool:
        """Return whether any record differs from that of a job whose work takes as long without a fault."""
        return truth.kind not in UNSEEN or self.named_rank(truth) is not None


def read(path: Path) -> Iterator[OracleJob]:
    """Yield the jobs of a file, one JSON document a line."""
    with path.open() as file:
        for line in file:
            yield _job(json.loads(line))


def _job(document: dict[str, Any]) -> OracleJob:
    job, ranks = document["job"], document["records"]
    records = [
        RankRecord(
            number,
            _columns([row["host"] for row in rows]),
            {} if rows[0]["device"] is None else _columns([row["device"] for row in rows]),
            _seconds([row["sync_wait"] for row in rows]),
        )
        for number, rows in enumerate(ranks)
    ]
    return OracleJob(
        job["seed"],
        records,
        batches_of(records, job["workers"], job["make_ms"] / 1e3),
        np.array([_seconds([row["gc"] for row in rows]) for rows in ranks]),
        np.array([_seconds([row["queued"] for row in rows]) for rows in ranks]),
        job["make_ms"] / 1e3,
        document["step_ms"],
        [Truth(**truth) for truth in document["truth"]],
    )


def _columns(rows: list[dict[str, float]]) -> dict[str, Float64]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _seconds([row.get(name, 0.0) for row in rows]) for name in names}


def _seconds(milliseconds: list[float]) -> Float64:
    return np.array(milliseconds) / 1e3
