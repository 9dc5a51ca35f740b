"""Advises a run on its loaders: one number, which changes only when the steps certainly have. Pure.

Samples of a steady loop differ, and the number of workers with them. So the figures are pooled over the run,
in blocks that are independent of each other. Once published, advice is replaced only by advice that is better
by more than the prediction is off, by all the blocks together. Blocks that show another loader than the ones
before begin the pool anew.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torchperfd.model.loader_facts import LoaderAdvice, LoaderFacts, WorkerCost
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.diagnosis.evidence import MIN_WINDOW_SAMPLES, WINDOW_SAMPLES
from torchperfd_daemon.loader_workers import MIN_GAIN, advise_loader, making_seconds, step_with

MIN_SAMPLES: Final = 3
AGREEING: Final = 8
"""So many samples in a row that give the same advice are enough to publish it on a quiet machine."""
MAX_SAMPLES_BEFORE: Final = 20
"""After so many it is published although they differ, or although other programs want the CPUs."""
_QUIET: Final = 0.2
"""Up to this share of the time without a CPU, successive samples are not of a burst of others."""
REPLACES_ABOVE: Final = 0.3
"""Another number replaces the published one where it saves more of the step that this one leaves."""
_ERRORS: Final = 3.0
"""Only differences of more than so many standard errors count."""
_MIN_BLOCKS: Final = 3
_MAX_BLOCKS: Final = 64
_OTHER: Final = 1.25
"""Blocks are of another loader, or of another model, if all differ from all earlier ones by this factor."""
_MEANS: Final = (
    "cpus",
    "draw_cpu",
    "rest_cpus",
    "receive_seconds",
    "worker_cpu_seconds",
    "worker_queued",
    "batches_per_step",
    "queued",
    "start_seconds",
)


@dataclass(frozen=True, slots=True)
class LoaderSample:
    """How one rank waits for its loader, as means over the newest window; seconds.

    Attributes:
        on_device: The model is on an accelerator.
    """

    rank: int
    facts: LoaderFacts
    step_seconds: float
    data_seconds: float
    on_device: bool = False


class LoaderAdviser:
    """The advice on the loaders of one run.

    Args:
        cost: Returns what a worker costs on this machine.
        fewest: Samples before which it is too early for any advice.
    """

    def __init__(self, cost: Callable[[], WorkerCost], fewest: int = MIN_SAMPLES) -> None:
        self.cost = cost
        self._fewest = fewest
        self.published: SettledAdvice | None = None
        """None until enough samples were seen."""
        self._newest: LoaderSample | None = None
        self._seen = 0
        self._votes: deque[tuple[str, int]] = deque(maxlen=AGREEING)
        self._blocks: deque[LoaderSample] = deque(maxlen=_MAX_BLOCKS)

    def advise(
        self, facts: LoaderFacts, step_seconds: float, data_seconds: float, *, on_device: bool
    ) -> LoaderAdvice | None:
        """Return the published advice, whatever the newest figures of one rank are; None without any."""
        return self.published.advice if self.published else None

    def observe(self, ranks: Sequence[LoaderSample]) -> None:
        """Add one sample of each rank, of the window that ends now; windows overlap."""
        sample = self._followed(ranks)
        if sample is None:
            return
        if self._newest is not None and sample.facts.workers != self._newest.facts.workers:
            self._forget()
        self._newest = sample
        self._seen += 1
        # The first window begins before the first sample.
        is_block = (self._seen + MIN_WINDOW_SAMPLES - 1) % WINDOW_SAMPLES == 0
        if is_block:
            self._blocks.append(sample)
        if self.published is None:
            self._votes.append(_key(self._advice(sample)))
            is_quiet = (sample.facts.queued or 0.0) <= _QUIET
            agree = is_quiet and len(self._votes) == AGREEING and len(set(self._votes)) == 1
            if agree or self._seen >= MAX_SAMPLES_BEFORE:
                self.settle()
        elif is_block:
            self._review()

    def settle(self) -> SettledAdvice | None:
        """Publish what is known so far, unless something is; return that, None if it is too early."""
        if self.published is None and self._newest is not None and self._seen >= self._fewest:
            pooled = self._pooled()
            self._publish(pooled, self._advice(pooled))
        return self.published

    def _forget(self) -> None:
        """Begin anew: the script has another loader."""
        self.published, self._newest, self._seen = None, None, 0
        self._votes.clear()
        self._blocks.clear()

    def _followed(self, ranks: Sequence[LoaderSample]) -> LoaderSample | None:
        """Return the rank that waits longest: the one that did, unless another now clearly does."""
        worst = max(ranks, key=lambda each: each.data_seconds, default=None)
        known = self._newest and next((each for each in ranks if each.rank == self._newest.rank), None)
        if worst is None or known is None:
            return worst
        return worst if worst.data_seconds > _OTHER * known.data_seconds else known

    def _review(self) -> None:
        """Replace the published advice where the blocks show with certainty that it has changed."""
        if self._has_changed():
            for _ in range(len(self._blocks) - _MIN_BLOCKS):
                self._blocks.popleft()
        if self.published is None or len(self._blocks) < _MIN_BLOCKS:
            return
        pooled, published = self._pooled(), self.published.advice
        found = self._advice(pooled)
        saved, error = self._shares(published, None)
        if _key(found) != _key(published):
            better, off = self._shares(found, published)
            is_better = better - _ERRORS * off > (REPLACES_ABOVE if published else 2 * MIN_GAIN)
            is_useless = published is not None and saved + _ERRORS * error < MIN_GAIN / 2
            if is_better or is_useless:
                self._publish(pooled, found)
                return
            found = self._again(published, pooled)
        saves = found.saves_seconds if found else 0.0
        was = published.saves_seconds if published else 0.0
        off = math.hypot(self._error_seconds(found), self.published.error_seconds)
        if abs(saves - was) > _ERRORS * off + MIN_GAIN * pooled.step_seconds:
            self._publish(pooled, found)

    def _again(self, published: LoaderAdvice | None, pooled: LoaderSample) -> LoaderAdvice | None:
        """Return the published advice with what it saves by newer figures."""
        if published is None:
            return None
        left = self._step_with(published, pooled)
        saves = pooled.step_seconds - left
        return replace(published, step_seconds=left, saves_seconds=saves) if saves > 0 else published

    def _publish(self, pooled: LoaderSample, advice: LoaderAdvice | None) -> None:
        self.published = SettledAdvice(
            pooled.rank,
            pooled.facts.workers,
            pooled.step_seconds,
            pooled.data_seconds,
            self._error_seconds(advice),
            advice,
        )

    def _shares(self, advice: LoaderAdvice | None, other: LoaderAdvice | None) -> tuple[float, float]:
        """Return what advice saves of the step that other advice leaves, and that share's standard error."""
        saved = []
        for block in self._blocks:
            left = self._step_with(other, block)
            saved.append(1 - self._step_with(advice, block) / left if left else 0.0)
        return statistics.fmean(saved), _error(saved)

    def _error_seconds(self, advice: LoaderAdvice | None) -> float:
        """Return the standard error of what advice saves of a step; 0 before there are blocks enough."""
        return _error([block.step_seconds - self._step_with(advice, block) for block in self._blocks])

    def _step_with(self, advice: LoaderAdvice | None, block: LoaderSample) -> float:
        return step_with(advice, block.facts, block.step_seconds, block.data_seconds, self.cost())

    def _advice(self, sample: LoaderSample) -> LoaderAdvice | None:
        return advise_loader(
            sample.facts, sample.step_seconds, sample.data_seconds, self.cost(), on_device=sample.on_device
        )

    def _pooled(self) -> LoaderSample:
        """Return the means over all blocks; the newest sample before the first block."""
        assert self._newest is not None, "called after a sample"
        blocks = self._blocks or [self._newest]
        facts = self._newest.facts
        means = {name: _mean([getattr(block.facts, name) for block in blocks]) for name in _MEANS}
        known: dict[str, Any] = {name: mean for name, mean in means.items() if mean is not None}
        return replace(
            self._newest,
            facts=replace(facts, **known),
            step_seconds=statistics.fmean(block.step_seconds for block in blocks),
            data_seconds=statistics.fmean(block.data_seconds for block in blocks),
        )

    def _has_changed(self) -> bool:
        """Return whether the newest blocks are of another loader or model than all the earlier ones."""
        blocks = [*self._blocks]
        # The block between may be of both.
        before, newest = blocks[: -_MIN_BLOCKS - 1], blocks[-_MIN_BLOCKS:]
        return bool(before) and (
            _apart([_making(each) for each in before], [_making(each) for each in newest])
            or _apart([_rest(each) for each in before], [_rest(each) for each in newest])
        )


def _making(block: LoaderSample) -> float:
    return making_seconds(block.facts, block.step_seconds, block.data_seconds)


def _rest(block: LoaderSample) -> float:
    return block.step_seconds - block.data_seconds


def _apart(before: Sequence[float], newest: Sequence[float]) -> bool:
    return min(newest) > _OTHER * max(before) or _OTHER * max(newest) < min(before)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 where it is unknown."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _key(advice: LoaderAdvice | None) -> tuple[str, int]:
    return (advice.rule, advice.workers) if advice else ("", 0)
