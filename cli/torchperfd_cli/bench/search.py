"""Which settings of a DataLoader to measure, in which order, and which to recommend. Pure.

A grid of W workers, P prefetch factors and B batch sizes has W x P x B settings. Throughput over workers
rises to a plateau and may fall after it, and the other arguments matter little beside it. So workers are
doubled until nothing is gained, and the gaps beside the best are closed. The other arguments follow one by
one, at the best so far. What came out best is measured again in turn with its rivals, because a machine's
speed changes within seconds, and because the best of many noisy figures is too high: of those that are
measured again, only these rounds count.
"""

import statistics
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Final

from torchperfd.model.loader_facts import MAX_WORKERS
from torchperfd_cli.bench.loader_process import (
    DEFAULT_PREFETCH,
    LoaderDescription,
    LoaderSetting,
    Outcome,
    Speed,
    Unusable,
)

_MORE_PREFETCH: Final = (4, 8)
# More workers have to give this much more to go on; a prefetch factor as well.
_MIN_GAIN: Final = 0.05
# Settings this far below the best may still be as good as it, by the noise of one measurement,
_RIVAL: Final = 0.12
# and by that of two rounds in turn with it.
_RIVAL_IN_ROUNDS: Final = 0.06
_MIN_ROUNDS: Final = 2
_MAX_ROUNDS: Final = 3
_MAX_CONFIRMATIONS: Final = 8
# Settings are equal if one is slower by less than this, or by less than this and not in every round.
_EQUAL: Final = 0.02
_EQUAL_BY_NOISE: Final = 0.04
_MEDIANS: Final = ("samples_per_second", "spread", "batch_seconds", "wait_seconds", "start_seconds")

Search = Generator[LoaderSetting, Outcome, None]


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be varied.

    Attributes:
        batch_sizes: To try beside the loader's own; empty for only that.
        start_methods: To try; empty for the loader's own.
        threads: To try; empty for the process's own.
    """

    most_workers: int
    batch_sizes: tuple[int, ...] = ()
    start_methods: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    pin_memory: bool = False


def search_space(
    facts: LoaderDescription,
    *,
    most_workers: int | None = None,
    batch_sizes: Iterable[int] = (),
    start_methods: Iterable[str] = (),
    threads: Iterable[int] = (),
) -> SearchSpace:
    """Return what to vary for a loader; as many workers as twice its CPUs, unless a number is given."""
    # Workers that wait for a disk or a network are of use beyond the CPUs.
    most = min(MAX_WORKERS, max(2, round(2 * facts.cpus))) if most_workers is None else most_workers
    return SearchSpace(most, tuple(batch_sizes), tuple(start_methods), tuple(threads), facts.has_device)


class LoaderSearch:
    """Chooses the next setting by what the former ones gave.

    Attributes:
        outcomes: By setting, in the order of measuring; a setting that was measured again has the medians of
            these rounds.
    """

    def __init__(self, facts: LoaderDescription, space: SearchSpace) -> None:
        self.outcomes: dict[LoaderSetting, Outcome] = {}
        self._facts = facts
        self._space = space
        self._rounds: dict[LoaderSetting, list[Speed]] = {}
        self._attempts: Counter[LoaderSetting] = Counter()

    def settings(self) -> Search:
        """Yield each setting to measure; send what it gave."""
        current = self._facts.current
        yield from self._measure(current)
        yield from self._vary_workers(current)
        yield from self._vary("prefetch", _MORE_PREFETCH, stop_early=True)
        if self._space.pin_memory:
            yield from self._vary("pin_memory", (True, False))
        yield from self._vary("threads", self._space.threads)
        yield from self._vary("start_method", self._space.start_methods)
        if self._facts.can_batch and self._space.batch_sizes:
            yield from self._vary("batch_size", self._space.batch_sizes)
            best = self.best()
            if best is not None and best.batch_size != current.batch_size:
                yield from self._close_gaps(best)
        yield from self._confirm()

    def best(self) -> LoaderSetting | None:
        """Return the fastest setting so far, None where none was usable."""
        fastest = max(self._speeds(), key=lambda pair: pair[1].samples_per_second, default=None)
        return fastest[0] if fastest else None

    def recommended(self) -> LoaderSetting | None:
        """Return the cheapest of the settings that are as fast as the fastest, None where none was usable.

        The loader's own is kept where nothing is faster.
        """
        best = self.best()
        if best is None:
            return None
        # Another batch size, start method or number of threads is worth a change only for its speed.
        equal = [
            each for each, _ in self._speeds() if self._is_like(each, best) and self._is_equal(each, best)
        ]
        current = self._facts.current
        if current in equal and current.cost <= best.cost:
            return current
        return min(equal, key=lambda setting: setting.cost)

    def _is_equal(self, setting: LoaderSetting, best: LoaderSetting) -> bool:
        """Return whether a setting is as fast as the best one, as far as the rounds show."""
        if setting == best:
            return True
        rounds = self._paired(setting, best)
        if not rounds and best in self._rounds:
            return False  # one measurement, long before
        ratio = statistics.median(rounds) if rounds else self._speed(setting) / self._speed(best)
        if ratio >= 1 - _EQUAL:
            return True
        return len(rounds) > 1 and ratio >= 1 - _EQUAL_BY_NOISE and max(rounds) >= 1

    def _paired(self, setting: LoaderSetting, best: LoaderSetting) -> list[float]:
        """Return a setting's speed as a part of the best one's, of each round in which both were measured."""
        rounds = zip(self._rounds.get(setting, ()), self._rounds.get(best, ()), strict=False)
        return [one.samples_per_second / other.samples_per_second for one, other in rounds]

    def _vary_workers(self, current: LoaderSetting) -> Search:
        workers, best, lean = 0, 0.0, 0
        while workers <= self._space.most_workers:
            setting = with_workers(current, workers)
            yield from self._measure(setting)
            if workers and isinstance(self.outcomes[setting], Unusable):
                return  # more of them are no better
            speed = self._speed(setting)
            # Not beside none: the first ones may cost more than they give, and many may not.
            if workers:
                lean = lean + 1 if speed < (1 + _MIN_GAIN) * best else 0
                best = max(best, speed)
            if lean == 2 or workers == self._space.most_workers:
                break
            workers = min(max(1, 2 * workers), self._space.most_workers)
        found = self.best()
        if found is not None:
            yield from self._close_gaps(found)

    def _close_gaps(self, around: LoaderSetting) -> Search:
        """Halve the gaps beside the best number of workers until none is left."""
        for _ in range(MAX_WORKERS):
            tried = sorted({setting.workers for setting in self.outcomes if self._is_like(setting, around)})
            best = max(tried, key=lambda workers: self._speed(with_workers(around, workers)), default=0)
            below = max((each for each in tried if each < best), default=best - 1)
            above = min((each for each in tried if each > best), default=best + 1)
            middle = [(below + best) // 2, (best + above + 1) // 2]
            fresh = [each for each in middle if 0 <= each <= self._space.most_workers and each not in tried]
            if not fresh:
                return
            yield from self._measure(with_workers(around, fresh[0]))

    def _vary(self, name: str, values: Iterable[object], *, stop_early: bool = False) -> Search:
        for value in values:
            best = self.best()
            if best is None or (not best.workers and name in ("prefetch", "start_method")):
                return
            setting = replace(best, **{name: value})  # type: ignore[arg-type]
            if setting in self.outcomes:
                continue
            before = self._speed(best)
            yield from self._measure(setting)
            if stop_early and self._speed(setting) < (1 + _MIN_GAIN) * before:
                return

    def _confirm(self) -> Search:
        for _ in range(_MAX_CONFIRMATIONS):
            best = self.best()
            if best is None:
                return
            rivals = self._rivals(best)
            is_clear = all(self._is_decided(each, best) for each in rivals)
            rounds = _MIN_ROUNDS if is_clear else _MAX_ROUNDS
            due = [each for each in (best, *rivals) if self._attempts[each] < rounds]
            if not due:
                return
            yield from self._measure(min(due, key=lambda each: self._attempts[each]), again=True)

    def _is_decided(self, setting: LoaderSetting, best: LoaderSetting) -> bool:
        """Return whether two rounds have shown a setting to be as fast as the best, or there are fewer."""
        rounds = self._paired(setting, best)
        return len(rounds) < _MIN_ROUNDS or statistics.median(rounds) >= 1 - _EQUAL

    def _rivals(self, best: LoaderSetting) -> list[LoaderSetting]:
        """Return the fastest, the cheapest and the own one of the settings that may be as good."""
        rivals = [each for each, _ in self._speeds() if each != best and self._is_rival(each, best)]
        if not rivals:
            return []
        fastest = max(rivals, key=self._speed)
        cheapest = min(rivals, key=lambda setting: setting.cost)
        own = [self._facts.current] if self._facts.current in rivals else []
        return list(dict.fromkeys([fastest, cheapest, *own]))

    def _is_rival(self, setting: LoaderSetting, best: LoaderSetting) -> bool:
        if not self._is_like(setting, best):
            return False
        rounds = self._paired(setting, best)
        if len(rounds) > 1:
            return statistics.median(rounds) >= 1 - _RIVAL_IN_ROUNDS
        return self._speed(setting) >= (1 - _RIVAL) * self._speed(best)

    def _measure(self, setting: LoaderSetting, *, again: bool = False) -> Search:
        if setting in self.outcomes and not again:
            return
        outcome = yield setting
        self._attempts[setting] += again
        if isinstance(outcome, Speed) and again:
            self._rounds.setdefault(setting, []).append(outcome)
            outcome = merged(self._rounds[setting])
        elif again:
            return  # it worked before: one failure of a round takes nothing back
        self.outcomes[setting] = outcome

    def _speeds(self) -> list[tuple[LoaderSetting, Speed]]:
        return [(setting, found) for setting, found in self.outcomes.items() if isinstance(found, Speed)]

    def _speed(self, setting: LoaderSetting) -> float:
        found = self.outcomes.get(setting)
        return found.samples_per_second if isinstance(found, Speed) else 0.0

    @staticmethod
    def _is_like(one: LoaderSetting, other: LoaderSetting) -> bool:
        """Return whether two settings differ only in what costs processes and memory."""
        return (
            one.batch_size == other.batch_size
            and one.threads == other.threads
            and one.start_method == other.start_method
        )


def merged(rounds: list[Speed]) -> Speed:
    """Return the rounds of one setting as one: the median of each figure, and of batches the sum."""
    medians = {name: statistics.median(getattr(each, name) for each in rounds) for name in _MEDIANS}
    return replace(rounds[-1], **medians, batches=sum(each.batches for each in rounds))


def with_workers(setting: LoaderSetting, workers: int) -> LoaderSetting:
    """Return a setting with another number of workers."""
    prefetch = (setting.prefetch or DEFAULT_PREFETCH) if workers else 0
    return replace(setting, workers=workers, prefetch=prefetch)
