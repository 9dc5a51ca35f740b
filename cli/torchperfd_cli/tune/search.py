"""Tries changes of a script one after another, and keeps those that are certainly faster. Pure.

Each change is tried on top of those that were kept before it. The script without it and with it are measured
in turn, because a machine's speed changes within seconds. A change is kept if the 95 % confidence interval of
the ratio lies below one by more than what is worth an edit. At the end all that was kept is verified beside
the unchanged script, in new processes for each pair.
"""

import contextlib
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from torchperfd.errors import TorchperfdError
from torchperfd.model.formatting import duration
from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderAdvice, WorkerCost
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.report.previous_runs import MAX_BYTES, script_marker
from torchperfd.report.record import read_record
from torchperfd.report.store import RunStore
from torchperfd_cli.bench.functions import Comparison, compare_rounds
from torchperfd_cli.tune.candidates import Group, Requested, propose
from torchperfd_cli.tune.trial import THREADS, Change, LossCheck, Trial, change, check_losses, merged, repeats
from torchperfd_cli.tune.trial_process import PAIRS_PER_PROCESS, PairStream, TrialFailedError

MIN_GAIN: Final = 0.02
MIN_ROUNDS: Final = 6
MAX_ROUNDS: Final = 18
HOPELESS_ROUNDS: Final = 3
# A change whose first pairs are slower by so much is given up.
_SLOWER: Final = 1.03
_CLEAR: Final = 0.93
MIN_FRESH: Final = 4
MAX_FRESH: Final = 10
# The whole gain is measured until its interval is so narrow.
_NARROW: Final = 1.08

_TOGETHER: Final = "all together, in new processes"
# What is measured: each of these takes another time.
_RUN: Final = "run"
_PAIR: Final = "pair"
_FIRST_PAIR: Final = "pair of new processes"

Pairs = list[tuple[float, float]]
"""Seconds of a step without a change and with it."""


class Trials(Protocol):
    """Runs the script. Each method raises TrialFailedError if there is nothing to measure."""

    def run(self, changes: Sequence[Change]) -> Trial:
        """Run it once with changes."""

    def pairs(self, without: Sequence[Change], with_it: Sequence[Change]) -> PairStream:
        """Measure two sets of changes in turn."""

    def fresh_pairs(self, without: Sequence[Change], with_it: Sequence[Change]) -> PairStream:
        """Measure them in turn, with new processes for each pair."""


_MAX_EARLIER_RUNS: Final = 4


@dataclass(frozen=True, slots=True)
class AdvisedRun:
    """What the card of a kept run advised.

    Attributes:
        run_id: Of the run, as ``torchperfd runs show`` takes it.
    """

    run_id: str
    settled: SettledAdvice


def newest_advised(store: RunStore, script: str) -> AdvisedRun | None:
    """Return what the newest run of a script on this machine was advised; None without such a run."""
    host = os.environ.get("NODE_NAME") or socket.gethostname()
    with suppress(OSError):
        for run_id, content in store.newest_with(script_marker(script), _MAX_EARLIER_RUNS, MAX_BYTES):
            with suppress(TorchperfdError):
                record = read_record(content, run_id)
                if record.loader_advice is not None and record.host == host:
                    return AdvisedRun(run_id, record.loader_advice)
    return None


@dataclass(frozen=True, slots=True)
class Kept:
    """A change that is faster.

    Attributes:
        beside: Its steps beside those without it.
        losses: How its losses compare with those of the script without it.
    """

    change: Change
    beside: Comparison
    losses: LossCheck


@dataclass(frozen=True, slots=True)
class Dropped:
    """A change that was tried and is not kept.

    Attributes:
        beside: Its steps beside those without it; None where too few pairs were measured.
    """

    change: Change
    reason: str
    beside: Comparison | None = None


@dataclass(slots=True)
class Tuning:
    """What was found.

    Attributes:
        unchanged: The first run of the script.
        repeated: How an unchanged run repeats its losses: ``exact``, ``close`` or ``any``.
        kept: In the order of trial.
        skipped: Not worth a trial, in words.
        total: All that is kept beside the unchanged script, in new processes; None where nothing is, or that
            was not measured.
        unverified: Why the new processes gave no ``total``, in words; empty if they did, or were not started.
        ended: Why it ended early: ``interrupted`` or ``time``; empty for not at all.
        advice: What the card of a kept run advised for the script's loader; else what the rule of the live
            verdict advises.
        advised_by: That run; empty for the rule.
    """

    unchanged: Trial
    repeated: str = ""
    kept: list[Kept] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    total: Comparison | None = None
    unverified: str = ""
    ended: str = ""
    advice: LoaderAdvice | None = None
    advised_by: str = ""

    @property
    def changes(self) -> tuple[Change, ...]:
        """What is kept; of several changes of one thing, the last."""
        changes: tuple[Change, ...] = ()
        for each in self.kept:
            changes = merged(changes, each.change)
        return changes

    @property
    def best_dropped(self) -> Dropped | None:
        """What was fastest of that which is not kept; None where too little was measured."""
        measured = [each for each in self.dropped if each.beside is not None]
        return min(measured, key=lambda each: each.beside.ratio if each.beside else 1.0, default=None)


def compare_pairs(pairs: Pairs) -> Comparison | None:
    """Return how a change compares; None where there are too few pairs for an interval."""
    return compare_rounds(*zip(*pairs, strict=True)) if len(pairs) >= HOPELESS_ROUNDS else None


class _TimeIsUpError(Exception):
    """No further run may begin."""


class TuningSearch:
    """Searches.

    Args:
        requested: Changes that may change what is trained.
        budget: Seconds. No run and no pair begins that usually takes longer than what is left of them.
        advised: What the card of a kept run of the script advised; None without one.
    """

    def __init__(
        self,
        trials: Trials,
        requested: Requested,
        clock: Callable[[], float],
        budget: float,
        progress: Callable[[str], None],
        cost: WorkerCost = UNMEASURED_COST,
        advised: AdvisedRun | None = None,
    ) -> None:
        self._cost = cost
        self._advised = advised
        self._trials = trials
        self._requested = requested
        self._clock = clock
        self._budget = budget
        self._progress = progress
        self._began = clock()
        self._taken: dict[str, list[float]] = {}

    def tune(self) -> Tuning:
        """Return what is faster.

        Raises:
            TrialFailedError: The unchanged script cannot be measured.
        """
        unchanged = self._run((), "the script as it is")
        found = Tuning(unchanged, advice=unchanged.loader_advice(self._cost))
        run = self._advised
        if run is not None and unchanged.has_workers(run.settled.workers_now):
            found.advice, found.advised_by = run.settled.advice, run.run_id
        try:
            self._search(found)
        except KeyboardInterrupt:
            found.ended = "interrupted"
        except _TimeIsUpError:
            found.ended = "time"
        return found

    def _search(self, found: Tuning) -> None:
        current = self._run((), "the script as it is, again")
        found.repeated = repeats(found.unchanged, current)
        # The script's own setting is what its other settings are measured beside.
        tried = {change(THREADS, threads=found.unchanged.facts.threads)}
        while True:
            groups, skipped = propose(current, found.changes, self._requested, self._advice(found, current))
            found.skipped = found.skipped or skipped
            remaining = (
                Group(new, group.share)
                for group in groups
                if (new := tuple(each for each in group.changes if each not in tried))
            )
            group = next(remaining, None)
            if group is None:
                break
            tried.update(group.changes)
            with_it = self._try(found, current, group)
            if with_it is not None:
                current = with_it
        if found.kept:
            self._verify(found)

    def _advice(self, found: Tuning, current: Trial) -> LoaderAdvice | None:
        """Return the advice on the loader: that of the card, if there was one, else by the newest figures."""
        return found.advice if found.advised_by else current.loader_advice(self._cost)

    def _try(self, found: Tuning, current: Trial, group: Group) -> Trial | None:
        """Try alternatives; return a run with the best of them where that is kept."""
        kept = found.changes
        usable: list[tuple[Change, Trial, LossCheck]] = []
        for each in group.changes:
            try:
                trial = self._run(merged(kept, each), each.code())
            except TrialFailedError as error:
                found.dropped.append(Dropped(each, f"failed: {error.problem}"))
                continue
            losses = check_losses(current, trial, each.losses, found.repeated)
            if losses.is_allowed:
                usable.append((each, trial, losses))
            else:
                found.dropped.append(Dropped(each, losses.words))
        if not usable:
            return None
        usable.sort(key=lambda one: one[1].step_seconds)
        best, trial, losses = usable[0]
        fastest = f"{best.arguments}, {duration(trial.step_seconds)}"
        found.dropped += [
            Dropped(each, f"slower in a first run: {duration(other.step_seconds)} a step; {fastest}")
            for each, other, _ in usable[1:]
        ]
        pairs: Pairs = []
        try:
            beside, reason = self._compare(kept, merged(kept, best), best.code(), pairs)
        except TrialFailedError as error:
            found.dropped.append(Dropped(best, f"failed: {error.problem}"))
            return None
        except (_TimeIsUpError, KeyboardInterrupt):
            without, with_it = duration(current.step_seconds), duration(trial.step_seconds)
            reason = f"not decided: {with_it} a step in a first run, {without} without it"
            found.dropped.append(Dropped(best, reason, compare_pairs(pairs)))
            raise
        if reason:
            found.dropped.append(Dropped(best, reason, beside))
            return None
        found.kept.append(Kept(best, beside, losses))
        return trial

    def _compare(
        self, without: Sequence[Change], with_it: Sequence[Change], name: str, pairs: Pairs
    ) -> tuple[Comparison, str]:
        """Return how a change compares, and why it is not kept; empty if it is."""
        for _ in self._measure(self._trials.pairs(without, with_it), name, pairs, MAX_ROUNDS):
            beside = compare_pairs(pairs)
            if beside is None:
                continue
            if len(pairs) == HOPELESS_ROUNDS and beside.ratio > _SLOWER:
                return beside, f"slower: takes {beside.ratio:.2f} times as long, in {len(pairs)} pairs"
            if len(pairs) < MIN_ROUNDS:
                continue
            # What differs little may be a property of the two processes, so that others have to confirm it.
            if beside.high < _CLEAR or (beside.high < 1 - MIN_GAIN and len(pairs) > MIN_ROUNDS):
                return beside, ""
            if beside.ratio > 1 - MIN_GAIN or len(pairs) >= MAX_ROUNDS:
                return beside, f"no certain gain: {beside.low:.2f} to {beside.high:.2f} of the time"
        raise AssertionError("pairs have no end")

    def _verify(self, found: Tuning) -> None:
        """Measure all that is kept in new processes; drop it where these do not repeat the gain."""
        try:
            total = self._measure_total(found.changes)
        except TrialFailedError as error:
            found.unverified = error.problem
            return
        if total.high < 1 - MIN_GAIN:
            found.total = total
            return
        reason = f"gain not repeated in new processes: {total.low:.2f} to {total.high:.2f} of the time"
        found.dropped += [Dropped(each.change, reason, total) for each in found.kept]
        found.kept = []

    def _measure_total(self, changes: Sequence[Change]) -> Comparison:
        pairs: Pairs = []
        for _ in self._measure(self._trials.fresh_pairs((), changes), _TOGETHER, pairs, MAX_FRESH):
            beside = compare_pairs(pairs)
            if beside is None or len(pairs) < MIN_FRESH:
                continue
            if beside.high / beside.low < _NARROW or len(pairs) >= MAX_FRESH:
                return beside
        raise AssertionError("pairs have no end")

    def _measure(self, measured: PairStream, name: str, pairs: Pairs, most: int) -> Iterator[None]:
        with contextlib.closing(measured):
            while True:
                has_started = len(pairs) % PAIRS_PER_PROCESS > 0
                kind = _TOGETHER if name == _TOGETHER else _PAIR if has_started else _FIRST_PAIR
                with self._timed(kind):
                    self._show(f"{name}, pair {len(pairs) + 1} of at most {most}")
                    pairs.append(next(measured))
                yield

    def _run(self, changes: Sequence[Change], words: str) -> Trial:
        with self._timed(_RUN):
            self._show(words)
            return self._trials.run(changes)

    def _show(self, words: str) -> None:
        left = max(0.0, self._budget - (self._clock() - self._began))
        self._progress(f"{words}; at most {duration(left)} left")

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Measure how long something takes that may not begin where it would usually end too late."""
        began = self._clock()
        # What was not measured yet takes about as long as a run.
        usual = statistics.median(self._taken.get(kind) or self._taken.get(_RUN) or [0.0])
        if began - self._began + usual > self._budget:
            raise _TimeIsUpError
        yield
        self._taken.setdefault(kind, []).append(self._clock() - began)
