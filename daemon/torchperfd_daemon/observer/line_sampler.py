"""Samples the stacks of a rank that waits for its data, to name the slow stage and the slow line.

Only while a verdict names the phase ``data``, and no more often than the limits here. Each sample is the
rank's own answer: the stacks of its training thread and of its DataLoader workers.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd.slow_line import SlowLine
from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.line_counts import LineCounts
from torchperfd_daemon.stacks import Loading, Stage, Thread, loading
from torchperfd_daemon.store import Rank

MOST_SAMPLES: Final = 40
"""Requests to one rank for one verdict."""
AGAIN_AFTER_S: Final = 600.0
"""A verdict that lasts is sampled again after this time, since the script may have changed what it does."""
_RETRY_AFTER_S: Final = 60.0
# At random: steps have a period as well.
_PAUSE_S: Final = (0.05, 0.15)
_ANSWER_S: Final = 2.0
_MOST_MISSED: Final = 3
_MOST_AT_ONCE: Final = 4

LoadingStacks = Callable[[Rank, float], Awaitable[tuple[Thread, ...] | None]]
"""Returns the training thread and the workers of a rank within so many seconds; None without an answer."""

_Key = tuple[str, Cause, int | None]


@dataclass(slots=True)
class _Attempt:
    due_at: float
    line: SlowLine | None = None


class LineSampler:
    """The slow lines of all runs.

    Args:
        stacks_of: Asks a rank for its stacks.
        is_capturing: Whether a capture of a run is under way; its ranks are left alone meanwhile.
    """

    def __init__(
        self,
        stacks_of: LoadingStacks,
        is_capturing: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._stacks_of = stacks_of
        self._is_capturing = is_capturing
        self._clock = clock
        self._sleep = sleep
        self._chance = random.Random()
        self._attempts: dict[_Key, _Attempt] = {}
        self._running: set[str] = set()

    def due(self, verdicts: Sequence[Verdict], ranks: Sequence[Rank]) -> tuple[Verdict, Rank] | None:
        """Return the first verdict of a run whose line is to be sampled now, with the rank to ask."""
        for verdict in verdicts:
            attempt = self._attempts.get(_key(verdict))
            if verdict.phase != "data" or (attempt and self._clock() < attempt.due_at):
                continue
            here = [rank for rank in ranks if rank.connected and verdict.rank in (None, rank.identity.rank)]
            if here and len(self._running) < _MOST_AT_ONCE and self._may_sample(verdict.run):
                return verdict, here[0]
        return None

    async def sample(self, verdict: Verdict, rank: Rank) -> SlowLine | None:
        """Sample a rank, and keep the line for :meth:`with_lines`; return it if it is new."""
        attempt = self._attempts.setdefault(_key(verdict), _Attempt(0.0))
        attempt.due_at = self._clock() + AGAIN_AFTER_S
        self._running.add(verdict.run)
        try:
            found = await self._sample(verdict.run, rank)
        finally:
            self._running.discard(verdict.run)
        before = attempt.line
        if found is None:
            attempt.due_at = self._clock() + _RETRY_AFTER_S
            return None
        attempt.line = found
        return found if before is None or _place(before) != _place(found) else None

    def with_lines(self, verdict: Verdict) -> Verdict:
        """Return a verdict and its further causes with the lines that are known."""
        attempt = self._attempts.get(_key(verdict))
        others = tuple(map(self.with_lines, verdict.others))
        line = attempt.line if attempt else None
        return replace(verdict, line=line, others=others) if line or others else verdict

    def forget_others(self, runs: Collection[str]) -> None:
        """Forget all runs but these."""
        self._attempts = {key: each for key, each in self._attempts.items() if key[0] in runs}

    def _may_sample(self, run: str) -> bool:
        return run not in self._running and not self._is_capturing(run)

    async def _sample(self, run: str, rank: Rank) -> SlowLine | None:
        counts, missed = LineCounts(), 0
        for _ in range(MOST_SAMPLES):
            await self._sleep(self._chance.uniform(*_PAUSE_S))
            if self._is_capturing(run) or not rank.connected:
                break
            threads = await self._stacks_of(rank, _ANSWER_S)
            missed = missed + 1 if threads is None else 0
            for thread, each in _loading_threads(threads or ()):
                place = each.place
                line = (place.file, place.line, place.function, each.call) if place else None
                counts.add(each.stage.value, line, in_worker=thread.worker_pid != 0)
            if counts.is_certain or missed >= _MOST_MISSED:
                break
        return counts.result()


def _loading_threads(threads: Sequence[Thread]) -> Iterator[tuple[Thread, Loading]]:
    for thread in threads:
        each = loading(thread) if thread.training or thread.worker_pid else None
        if each is not None and each.stage is not Stage.WAIT:
            yield thread, each


def _key(verdict: Verdict) -> _Key:
    return verdict.run, verdict.cause, verdict.rank


def _place(line: SlowLine) -> tuple[str, str, int]:
    return line.stage, line.file, line.line
