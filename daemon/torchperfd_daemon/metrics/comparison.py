"""What a verdict on the ranks of all nodes needs of each node, as metrics.

A node's verdict compares that node's ranks only. A reader of the series of all nodes compares their ranks by
own work, with the rules of daemons that ask each other (``fleet.verdict``), and so comes to the same verdict.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import MATERIAL, compare
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.metrics.page import RANK_LABELS, SeriesCap
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.observer.rank_window import is_on_device, stage_of
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store

_OWN: Final = "own"
_WAIT: Final = "collective_wait"
MAX_CAUSES: Final = 8
"""Causes of one run that have series; those that cost less are left out."""


class ComparisonMetrics:
    """A metrics source: each rank's own work, and the causes of the verdict on each run.

    Args:
        cap: Selects the ranks that get series; all ranks without it.
    """

    def __init__(self, store: Store, observer: Observer, cap: SeriesCap | None = None) -> None:
        self._store = store
        self._observer = observer
        self._cap = cap

    def families(self) -> Iterator[Family]:
        """Return the own work of ranks, and what the verdict on each run is made of."""
        self._store.forget_departed()
        ranks = list(self._store.ranks()) if self._cap is None else self._cap.select(self._store)
        shown: dict[str, list[Rank]] = {}
        for rank in ranks:
            shown.setdefault(rank.identity.run, []).append(rank)
        yield from self._work(shown)
        runs = self._store.runs()
        yield from _causes(
            [self._observer.verdict(run) or verdict_on_mean_step(run, runs[run]) for run in shown]
        )

    def _work(self, runs: dict[str, list[Rank]]) -> Iterator[Family]:
        own = Family(
            "train_own_work_seconds",
            "Own work per step: the step less the wait for other ranks, over the newest ten seconds.",
            "gauge",
            RANK_LABELS,
        )
        wait = Family(
            "train_peer_wait_seconds",
            "Wait for other ranks per step, over the newest ten seconds.",
            "gauge",
            RANK_LABELS,
        )
        error = Family(
            "train_own_work_error_seconds",
            "Standard error of train_own_work_seconds.",
            "gauge",
            RANK_LABELS,
        )
        for run, ranks in runs.items():
            training = [rank for rank in ranks if rank.connected and rank.state is State.TRAINING]
            on_device = {rank.identity.rank for rank in training if is_on_device(rank.totals)}
            for work in self._compared(training):
                labels = run, str(work.rank)
                own_seconds, wait_seconds = work.own_seconds, work.wait_seconds
                own.add(own_seconds, *labels)
                is_seen = wait_seconds >= MATERIAL * (own_seconds + wait_seconds)
                if is_seen or work.rank not in on_device:
                    wait.add(wait_seconds, *labels)
                if work.is_long_enough:
                    error.add(work.own_error_seconds, *labels)
        yield from (own, wait, error)

    def _compared(self, ranks: Sequence[Rank]) -> list[RankWork]:
        """Return the times by which ranks are to be compared, as for a survey of all nodes."""
        host = {rank: work for rank in ranks if (work := _host_work(rank)) is not None}
        device = [self._observer.device_work(rank) if is_on_device(rank.totals) else None for rank in host]
        return compare([*host.values()], device).works


def _host_work(rank: Rank) -> RankWork | None:
    """Return the own work and the wait of a rank's present steps; None without any, or without phases.

    Phases sum to the step, and are not needed one by one.
    """
    steps = rank.history.newest(rank.present_steps)
    if not len(steps.duration_ns) or not steps.phases:
        return None
    durations = np.asarray(steps.duration_ns, dtype=np.int64) / 1e9
    waits = np.asarray(steps.phases.get(_WAIT, [0] * len(durations)), dtype=np.int64) / 1e9
    return RankWork(rank.identity.rank, {_OWN: durations - waits, _WAIT: waits}, stage_of(rank.totals))


def _causes(verdicts: Sequence[Verdict]) -> Iterator[Family]:
    costs = Family(
        "train_cause_seconds",
        "Time per step that a cause of the verdict costs; without a blamed rank, it is of all ranks.",
        "gauge",
        ("run", "cause", "blamed_rank", "phase"),
    )
    stalled = Family("train_stalled_seconds", "Time without a step during a hang.", "gauge", ("run",))
    unseen = Family(
        "train_verdict_unseen_ranks",
        "Ranks on other nodes, without which the verdict is unknown.",
        "gauge",
        ("run",),
    )
    for verdict in verdicts:
        named: dict[tuple[str, str, str], float] = {}
        for each in (verdict, *verdict.others)[:MAX_CAUSES]:
            if each.cause is not Cause.NONE:
                rank = "" if each.rank is None else str(each.rank)
                named.setdefault((each.cause.value, rank, each.phase), each.cost_seconds_per_step)
        for labels, seconds in named.items():
            costs.add(seconds, verdict.run, *labels)
        if verdict.stalled_seconds:
            stalled.add(verdict.stalled_seconds, verdict.run)
        if verdict.unseen_ranks:
            unseen.add(verdict.unseen_ranks, verdict.run)
    yield from (costs, stalled, unseen)
