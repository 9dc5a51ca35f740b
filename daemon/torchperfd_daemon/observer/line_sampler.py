"""Samples the stacks of a rank, to name the line of the script at which a run loses its time.

Only while a verdict lays the time to the host, and no more often than the limits here. Each sample is the
rank's own answer: the stacks of its training thread and of its DataLoader workers. `LineCounts` finds the
stage and the line that take longest.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

from torchperfd.model.source_lines import THREAD, SlowLine, place_words
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.stacks.activity import (
    Part,
    ScriptLine,
    Stage,
    host_part,
    loading,
    running_line,
    script_lines,
)
from torchperfd_daemon.stacks.model import Thread
from torchperfd_daemon.store.store import Rank

MIN_SAMPLES: Final = 8
"""With fewer samples nothing is reported."""
ENOUGH_SAMPLES: Final = 20
"""With as many, a line that stands out by chance once in a thousand times is certain."""
MIN_LINE_SHARE: Final = 0.25
"""A line stands out if at least this part of the samples is at it."""
MOST_OF: Final = 0.75
"""A line whose calls take this part of the samples is named if no line within these calls does."""
_DEVIATIONS: Final = 3.0

_Line = tuple[str, int, str, str]
"""File, number, function, and what the line calls."""
_Place = tuple[str, int, str]
_NO_LINE: Final[_Line] = ("", 0, "", "")


class LineCounts:
    """The samples so far.

    Args:
        of_step: They are of the host's work in a step, not of loading.
    """

    def __init__(self, *, of_step: bool = False) -> None:
        self._of_step = of_step
        self._counts: Counter[tuple[str, _Line]] = Counter()
        self._in_workers = 0
        self._around: Counter[_Line] = Counter()
        self._elsewhere: set[_Place] = set()
        self._entries: Counter[tuple[_Place, _Place | None]] = Counter()

    @property
    def samples(self) -> int:
        return self._counts.total()

    @property
    def is_certain(self) -> bool:
        """Whether more samples would not name another line."""
        if self.samples < ENOUGH_SAMPLES:
            return False
        counts = [count for _, count in self._counts.most_common(2)] + [0]
        return counts[0] - counts[1] >= _DEVIATIONS * math.sqrt(counts[0] + counts[1])

    def add(
        self,
        stage: str,
        line: _Line | None,
        *,
        in_worker: bool,
        callers: Sequence[_Line] = (),
        entry: _Place | None = None,
    ) -> None:
        """Add a sample: what a process did, and where.

        Args:
            line: None for a place that is not known.
            callers: The lines of the script that have led to it, the innermost first.
            entry: The line at which the stage enters the script, if it is another one.
        """
        self._counts[stage, line or _NO_LINE] += 1
        self._in_workers += in_worker
        if line is not None:
            self._entries[_place_of(line), entry] += 1
            # Each place once, however often a function calls itself, and the innermost first.
            once = {_place_of(each): each for each in (*reversed(callers), line)}
            self._around.update(reversed(once.values()))

    def add_elsewhere(self, lines: Sequence[_Line]) -> None:
        """Add a sample of another part of the step. Its lines call all parts, so none of them is named."""
        self._elsewhere.update(map(_place_of, lines))

    def result(self) -> SlowLine | None:
        """Return the stage that takes longest, and its line if one stands out; None with too few samples."""
        total = self.samples
        if total < MIN_SAMPLES:
            return None
        stages: Counter[str] = Counter()
        for (stage, _), count in self._counts.items():
            stages[stage] += count
        stage, in_stage = stages.most_common(1)[0]
        lines = Counter({line: count for (name, line), count in self._counts.items() if name == stage})
        place, count = _by_place(lines).most_common(1)[0]
        if count < MOST_OF * total:
            around = {each: n for each, n in self._around.items() if _place_of(each) not in self._elsewhere}
            shared = {each: n for each, n in _by_place(around).items() if n >= MOST_OF * total}
            if shared:
                # The further in, the fewer samples share a line.
                place, lines = min(shared, key=lambda each: shared[each]), Counter(around)
                count = shared[place]
        found = SlowLine(
            stage,
            in_stage / total,
            samples=total,
            in_workers=2 * self._in_workers > total,
            of_step=self._of_step,
        )
        if place == _place_of(_NO_LINE) or count < MIN_LINE_SHARE * total:
            return found
        call = max((line for line in lines if _place_of(line) == place), key=lambda line: lines[line])[3]
        file, number, function = place
        caller = self._entry_of(place)
        return replace(
            found, file=file, line=number, function=function, call=call, share=count / total, caller=caller
        )

    def _entry_of(self, place: _Place) -> str:
        """Return the line that has led to a place in most of its samples, in words; empty without one."""
        entries = {entry: count for (inner, entry), count in self._entries.items() if inner == place}
        most = max(entries, key=lambda entry: entries[entry], default=None)
        return place_words(*most) if most and 2 * entries[most] > sum(entries.values()) else ""


def _place_of(line: _Line) -> _Place:
    return line[:3]


def _by_place(lines: Mapping[_Line, int]) -> Counter[_Place]:
    """Return the samples of each place: the same line may be seen in several calls."""
    places: Counter[_Place] = Counter()
    for line, count in lines.items():
        places[_place_of(line)] += count
    return places


MAX_SAMPLES: Final = 40
"""Requests to one rank for one verdict."""
AGAIN_AFTER_S: Final = 600.0
"""A verdict that lasts is sampled again after this time, since the script may have changed what it does."""
_RETRY_AFTER_S: Final = 60.0
BETWEEN_S: Final = 20.0
"""Between two verdicts of one run, whose causes and ranks may change all the time."""
# At random: steps have a period as well.
_PAUSE_S: Final = (0.05, 0.15)
_ANSWER_S: Final = 2.0
_MAX_MISSED: Final = 3
_MAX_AT_ONCE: Final = 4

SampleStacks = Callable[[Rank, float], Awaitable[tuple[Thread, ...] | None]]
"""Returns threads of a rank within so many seconds; None without an answer."""

_Key = tuple[str, Cause, int | None]

_LOADING: Final = frozenset({Part.WAIT})
_OF_PHASES: Final = (Cause.SLOW_RANK, Cause.UNKNOWN, Cause.SCRIPT_CODE)
# The loop is in these parts, so that lines around them are not those of the script's own code.
_OF_TORCH: Final = frozenset({Part.BACKWARD, Part.OPTIMIZER})
_NOTHING: Final = frozenset[Part]()
_OTHER_THREADS: Final = frozenset({Part.THREAD})
_OF_PHASE: Final[Mapping[str, frozenset[Part]]] = {
    "forward": frozenset({Part.FORWARD}),
    "loss": frozenset({Part.FORWARD, Part.OTHER}),
    "optimizer": frozenset({Part.OPTIMIZER}),
    # Native code, other ranks and files, where no line of the loop helps.
    **dict.fromkeys(("backward", "collective_wait", "checkpoint", "validate"), _NOTHING),
}


@dataclass(slots=True)
class _Attempt:
    due_at: float
    line: SlowLine | None = None


class LineSampler:
    """The slow lines of all runs.

    Args:
        stacks_of: Asks a rank for the stacks of its training thread and of its workers.
        is_capturing: Whether a capture of a run is under way; its ranks are left alone meanwhile.
        threads_of: Asks a rank for the stacks of all threads of its process.
    """

    def __init__(
        self,
        stacks_of: SampleStacks,
        is_capturing: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        threads_of: SampleStacks | None = None,
    ) -> None:
        self._stacks_of = stacks_of
        self._threads_of = threads_of or stacks_of
        self._is_capturing = is_capturing
        self._clock = clock
        self._sleep = sleep
        self._chance = random.Random()
        self._attempts: dict[_Key, _Attempt] = {}
        self._running: set[str] = set()
        self._rests_until: dict[str, float] = {}

    def due(self, verdicts: Sequence[Verdict], ranks: Sequence[Rank]) -> tuple[Verdict, Rank] | None:
        """Return the first verdict of a run whose line is to be sampled now, with the rank to ask."""
        for verdict in verdicts:
            attempt = self._attempts.get(_key(verdict))
            if not _parts(verdict) or (attempt and self._clock() < attempt.due_at):
                continue
            here = [rank for rank in ranks if rank.connected and verdict.rank in (None, rank.identity.rank)]
            if here and len(self._running) < _MAX_AT_ONCE and self._may_sample(verdict.run):
                return verdict, here[0]
        return None

    async def sample(
        self, verdict: Verdict, rank: Rank, again_after: float = AGAIN_AFTER_S
    ) -> SlowLine | None:
        """Sample a rank, and keep the line for :meth:`with_lines`; return it if it is new.

        Args:
            again_after: The seconds after which the verdict is sampled again.
        """
        attempt = self._attempts.setdefault(_key(verdict), _Attempt(0.0))
        attempt.due_at = self._clock() + again_after
        self._running.add(verdict.run)
        try:
            found = await self._sample(verdict, rank)
        finally:
            self._running.discard(verdict.run)
            self._rests_until[verdict.run] = self._clock() + BETWEEN_S
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
        self._attempts = {key: each for key, each in self._attempts.items() if key[0] in runs}
        self._rests_until = {run: until for run, until in self._rests_until.items() if run in runs}

    def _may_sample(self, run: str) -> bool:
        is_resting = self._clock() < self._rests_until.get(run, 0.0)
        return run not in self._running and not is_resting and not self._is_capturing(run)

    async def _sample(self, verdict: Verdict, rank: Rank) -> SlowLine | None:
        parts = _parts(verdict)
        is_of_threads = parts == _OTHER_THREADS
        stacks_of = self._threads_of if is_of_threads else self._stacks_of
        counts, missed = LineCounts(of_step=parts != _LOADING and not is_of_threads), 0
        for _ in range(MAX_SAMPLES):
            await self._sleep(self._chance.uniform(*_PAUSE_S))
            if self._is_capturing(verdict.run) or not rank.connected:
                break
            threads = await stacks_of(rank, _ANSWER_S)
            missed = missed + 1 if threads is None else 0
            for thread in threads or ():
                if parts == _LOADING:
                    _add_loading(counts, thread)
                elif is_of_threads:
                    _add_other_thread(counts, thread)
                else:
                    _add_host_work(counts, thread, parts, verdict.cause)
            if counts.is_certain or missed >= _MAX_MISSED:
                break
        result = counts.result()
        if is_of_threads and result is not None and result.file:
            rank.blocked_by = f"{result.function}() at {PurePath(result.file).name}:{result.line}"
        # That most of the forward is in the forward is no news.
        return result if result is None or result.file or not result.of_step else None


def _parts(verdict: Verdict) -> frozenset[Part]:
    """Return the parts of a step whose samples explain a verdict; :data:`_LOADING` for a wait for data.

    Empty for verdicts that no line of the training thread explains.
    """
    if verdict.phase == "data":
        return _LOADING
    if verdict.cause is Cause.INTERPRETER_LOCK:
        return _OTHER_THREADS
    if verdict.cause is Cause.HOST_BOUND:
        return frozenset({Part.FORWARD, Part.OPTIMIZER, Part.OTHER})
    # A part of the step that keeps a run from being called healthy has no cost: what is lost is unknown.
    is_worth_it = verdict.cost_seconds_per_step or verdict.cause is Cause.UNKNOWN
    if verdict.cause in _OF_PHASES and verdict.phase and is_worth_it:
        # A phase that is not in the table is `other`, or one of the script's own.
        return _OF_PHASE.get(verdict.phase, frozenset({Part.OTHER}))
    return _NOTHING


def _add_loading(counts: LineCounts, thread: Thread) -> None:
    each = loading(thread) if thread.training or thread.worker_pid else None
    if each is None or each.stage is Stage.WAIT:
        return
    place = each.place
    line = (place.file, place.line, place.function, each.call) if place else None
    entry = (each.caller.file, each.caller.line, each.caller.function) if each.caller else None
    counts.add(each.stage.value, line, in_worker=thread.worker_pid != 0, entry=entry)


def _add_host_work(counts: LineCounts, thread: Thread, parts: frozenset[Part], cause: Cause) -> None:
    if not thread.training or not thread.frames:
        return
    # Script code is a cause only for ranks without a device.
    part = host_part(thread.frames, on_device=cause is not Cause.SCRIPT_CODE)
    lines = [_line(each) for each in script_lines(thread.frames)]
    if part in parts:
        # In the forward and the optimizer, the loop's line that calls them is no news.
        callers = lines[1:] if part is Part.OTHER else ()
        counts.add(part.value, lines[0] if lines else None, in_worker=False, callers=callers)
    elif part in _OF_TORCH:
        counts.add_elsewhere(lines)


def _add_other_thread(counts: LineCounts, thread: Thread) -> None:
    found = None if thread.training or thread.own or thread.worker_pid else running_line(thread.frames)
    if found is not None:
        counts.add(THREAD, _line(found), in_worker=False)


def _line(found: ScriptLine) -> _Line:
    return found.place.file, found.place.line, found.place.function, found.call


def _key(verdict: Verdict) -> _Key:
    return verdict.run, verdict.cause, verdict.rank


def _place(line: SlowLine) -> tuple[str, str, int]:
    return line.stage, line.file, line.line
