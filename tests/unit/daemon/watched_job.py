"""A simulated job, and the observer that watches it."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import numpy as np
from benchmarks.accuracy.streams import Change, Job
from tests.support.values import some

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store

RUN = "streamed"


class Watched:
    """A job of some ranks, and the observer that watches it once a second of the job's clock."""

    def __init__(
        self,
        ranks: int = 8,
        seed: int = 0,
        spread: float = 0.03,
        *,
        stages: int = 1,
        on_device: bool = False,
    ) -> None:
        self.store = Store(clock=lambda: 0.0)
        self.job = Job(
            self.store, ranks, np.random.default_rng(seed), spread, stages=stages, on_device=on_device
        )
        self.families: list[Family] = []
        self.stacks: list[RankStacks] = []
        self.asked = 0
        self.observer = Observer(
            self.store,
            self._ask,
            lambda: self.families,
            clock=lambda: self.job.seconds,
            wall=lambda: self.job.wall,
        )

    async def _ask(self, ranks: Iterable[Rank], seconds: float, /) -> AsyncIterator[RankStacks]:
        self.asked += 1
        for reported in self.stacks:
            yield reported

    def train(self, seconds: int, change: Change = lambda _rank, _step: {}) -> list[Verdict | None]:
        """Train so many seconds; return the verdict at the end of each."""
        reported = []
        for _ in range(seconds):
            self.job.train(1.0, change)
            assert self.observer.sample() == []
            reported.append(self.observer.verdict(RUN))
        return reported

    def stand(self, seconds: int) -> list[int]:
        """Let time go by without a step; return after which seconds stacks were asked for."""
        due = []
        for second in range(1, seconds + 1):
            self.job.seconds += 1
            if self.observer.sample():
                due.append(second)
                asyncio.run(self.observer.read_stacks(RUN))
        return due

    @property
    def verdict(self) -> Verdict:
        return some(self.observer.verdict(RUN))

    def finish(self) -> None:
        """Let all ranks end."""
        for rank in self.job.ranks:
            rank.state = State.FINISHED


def slow(only: int | None = None, *, every: int = 1, **phases: float) -> Change:
    """Return a change that makes phases of one rank, or of all, longer in every so many steps."""
    return lambda rank, step: phases if only in (None, rank) and step % every == 0 else {}


def collecting(seconds: float, every: int, apart: int) -> Change:
    """Return collections of all ranks every so many steps, each rank so many steps after the one before."""
    return lambda rank, step: {"gc": seconds} if (step + apart * rank) % every == 0 else {}


def assert_named(reported: list[Verdict | None], rank: int, within: int, cause: Cause | None = None) -> None:
    """Check that a rank is named within so many seconds, and from then on always."""
    named = [
        each is not None and each.rank == rank and (cause is None or each.cause is cause) for each in reported
    ]
    assert any(named[:within]), [each and each.summary for each in reported[:within]]
    assert all(named[within:]), [each and each.summary for each in reported[within:]]


def causes_of(reported: list[Verdict | None]) -> set[Cause]:
    """Return the causes of the verdicts that there are."""
    return {each.cause for each in reported if each}
