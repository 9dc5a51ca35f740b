"""Cycles: steps whose events are those of the step before, of which the loop has no more to learn.

What the loop makes of an event depends on the events so far, never on when they happened. A step that
ends in the state in which it began therefore says what to do with every step after it that has the
same events. That is done in C (``_templates.c``), all such steps at once, so that the training thread gives
up a thirtieth of the time that telling one by one takes, and gives it up in one go. Where the C half is
missing everything is told one by one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from struct import calcsize, unpack_from
from typing import Any, Final

from torchperfd.events import codes as on_tape
from torchperfd.steps.arrivals import STEP_BYTES
from torchperfd.steps.loop import Loop
from torchperfd.steps.recorder import COLLECTIVE_WAIT, MAX_DEPTH, OTHER, TRAIN, Recorder
from torchperfd.steps.step_batch import PhaseColumns, StepBatch

try:
    from torchperfd.steps import _templates
except ImportError:
    _templates = None  # type: ignore[assignment]

AVAILABLE: Final = _templates is not None

_DONE, _ENTER, _EXIT, _NAME_GAP, _COUNT, _CLOSE, _ARRIVE = range(7)
# Events of which the loop does the same with any argument: how many samples, how many batches wait, how long
# ago a collective was come to; and nothing at all with what was written twice.
_ANY_ARGUMENT: Final = frozenset((on_tape.DRAWN, on_tape.READY, on_tape.COLLECTIVE, on_tape.REDUCTION))

_EVENT_BYTES: Final = calcsize(on_tape.EVENT_FORMAT)
_MOST_EVENTS: Final = 4096
_MOST_KNOWN: Final = 8
_ALL_BITS: Final = -1

# Events that have the loop do something to the recorder, and nothing to anything else that time or a
# count could change. Not in here: what begins, ends or disturbs a loop, and what goes with a device.
_REPEATABLE: Final = frozenset(
    (
        *(on_tape.DRAW, on_tape.DRAWN, on_tape.READY, on_tape.TOKENS),
        *(on_tape.FORWARD, on_tape.EVALUATE, on_tape.FORWARD_END),
        *(on_tape.BACKWARD, on_tape.BACKWARD_END, on_tape.ZERO, on_tape.ZERO_END),
        *(on_tape.OPTIMIZER, on_tape.OPTIMIZER_END, on_tape.SCALER, on_tape.SCALER_END),
        *(on_tape.ENTER, on_tape.EXIT, on_tape.STEP),
        *(on_tape.COLLECTIVE, on_tape.COLLECTIVE_END, on_tape.REDUCTION),
    )
)


class Scribe:
    """Stands in for the recorder while a step is told, and writes down what the loop has it do."""

    def __init__(self, recorder: Recorder) -> None:
        self.plain = True
        """Whether all of it can be repeated."""
        self.words: list[int] = []
        self.deeds = bytearray()
        self.kind = 0
        self._recorder = recorder

    def event(self, word: int) -> None:
        """The next event is about to be told."""
        if self.words:
            self.end()
        self.words.append(word)
        self.plain &= word & on_tape.CODE_MASK in _REPEATABLE and len(self.words) < _MOST_EVENTS

    def end(self) -> None:
        """All that the newest event does is done."""
        self.deeds += bytes((_DONE, 0))

    # What the loop calls, and can be repeated.

    def enter(self, phase: int) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth < MAX_DEPTH
        self.deeds += bytes((_ENTER, phase))
        self._recorder.enter(phase)

    def push(self, phase: int) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.enter(phase) if self._recorder.is_open else self._recorder.push(phase)

    def arrive(self, ago: int = 0) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth < MAX_DEPTH
        self.plain &= ago == self.words[-1] >> on_tape.ARGUMENT_SHIFT
        self.deeds += bytes((_ARRIVE, COLLECTIVE_WAIT))
        self._recorder.arrive(ago)

    def exit(self) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth <= MAX_DEPTH
        if self._recorder.depth:
            self.deeds += bytes((_EXIT, 0))
        self._recorder.exit()

    def name_gap(self, phase: int) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open
        self.deeds += bytes((_NAME_GAP, phase))
        self._recorder.name_gap(phase)

    def close(self, kind: int, index: int, *, at_last: bool = False) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= not at_last and not self.kind
        self.kind = kind
        self.deeds += bytes((_CLOSE, kind))
        self._recorder.close(kind, index, at_last=at_last)

    def open(self) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open
        self._recorder.open()

    @property
    def samples(self) -> int:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        return self._recorder.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        self.plain &= samples - self._recorder.samples == self.words[-1] >> on_tape.ARGUMENT_SHIFT
        self.deeds += bytes((_COUNT, 0))
        self._recorder.samples = samples

    # What only looks, and what cannot be repeated.

    @property
    def is_open(self) -> bool:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        return self._recorder.is_open

    @property
    def depth(self) -> int:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        return self._recorder.depth

    def inside(self, phase: int) -> bool:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        return self._recorder.inside(phase)

    def idle(self) -> bool:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        return self._recorder.idle()

    def __getattr__(self, name: str) -> Any:
        self.plain = False
        return getattr(self._recorder, name)


class Cycle:
    """A step that ends in the state in which it began.

    Args:
        scribe: What was written down of it.
        counted: By how much each of the loop's counts grew.
        around: Phases that it began in.
    """

    def __init__(self, scribe: Scribe, counted: dict[str, int], around: tuple[int, ...]) -> None:
        words = scribe.words
        entered = (
            operand
            for deed, operand in zip(scribe.deeds[::2], scribe.deeds[1::2], strict=True)
            if deed in (_ENTER, _NAME_GAP, _ARRIVE)
        )
        self.phases = bytes(sorted({OTHER, *around, *entered}))
        self.counted = counted
        self.kind = scribe.kind
        self.deeds = bytes(scribe.deeds)
        self.length = len(words)
        self.arrives = self.kind == TRAIN and _ARRIVE in self.deeds[::2]
        self.draws = [n for n, word in enumerate(words) if word & on_tape.CODE_MASK == on_tape.DRAW]
        self.ready = [n for n, word in enumerate(words) if word & on_tape.CODE_MASK == on_tape.READY]
        self.words = array("q", words)
        self.masks = array("q", [_ALL_BITS]) * len(words)
        for number, word in enumerate(words):
            if word & on_tape.CODE_MASK in _ANY_ARGUMENT:
                self.masks[number] = on_tape.CODE_MASK
                self.words[number] = word & on_tape.CODE_MASK

    @property
    def draws_from_one(self) -> bool:
        """Whether all its batches come from one iterator; which one makes no difference then."""
        return len({self.words[number] for number in self.draws}) == 1

    def stretch(
        self, count: int, places: int, columns: bytes, sums: tuple[tuple[int, int, float], ...]
    ) -> StepBatch:
        """Return so many steps like this one, as C gives them."""
        all_places = memoryview(columns).cast("q")
        index, kind, start, duration, samples, *phases = (
            all_places[at : at + count] for at in range(0, len(all_places), places)
        )
        total_ns, total_samples, squares = sums[-1]
        return StepBatch(
            index=index,
            kind=kind,
            start=start,
            duration=duration,
            samples=samples,
            phases={
                slot: PhaseColumns(phases[2 * number], phases[2 * number + 1], *sums[number])
                for number, slot in enumerate(self.phases)
                if sums[number][1]
            },
            total_ns=total_ns,
            squares=squares,
            total_samples=total_samples,
        )

    def redraw(self, draw: int) -> None:
        """From now on its batches come from the iterator of that event."""
        for number in self.draws:
            self.words[number] = draw


class Cycles:
    """Knows the cycles of one loop.

    Args:
        loop: Decides what events mean.
        recorder: Times them.
    """

    def __init__(self, loop: Loop, recorder: Recorder) -> None:
        self._loop = loop
        self._recorder = recorder
        self._known: OrderedDict[tuple[object, ...], Cycle] = OrderedDict()

    @contextmanager
    def lesson(self) -> Iterator[Scribe | None]:
        """Have the step that is told meanwhile written down, and keep it if it is a cycle.

        Gives None where it cannot be one.
        """
        around, state = self._recorder.standing(), self._standing()
        if around is None:
            yield None
            return
        before = self._loop.counts()
        scribe = Scribe(self._recorder)
        self._loop.recorder = scribe  # type: ignore[assignment]  # has all of it that the loop uses
        try:
            yield scribe
        finally:
            self._loop.recorder = self._recorder
        scribe.end()
        if state is not None and scribe.plain and scribe.kind and self._standing() == state:
            counts = self._loop.counts()
            counted = {name: counts[name] - before[name] for name in counts}
            self._known[state] = Cycle(scribe, counted, around)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def repeat(self, events: memoryview, before: int) -> tuple[int, bool]:
        """Take in the steps that are known, if they come now.

        Args:
            events: What comes.
            before: Word of the event before it.

        Returns:
            How many bytes of events they are; whether nothing comes then but what begins like another.
        """
        state = self._standing()
        cycle = self._known.get(state) if state is not None else None
        if cycle is None:
            return 0, False
        if cycle.draws_from_one and before & on_tape.CODE_MASK == on_tape.DRAW:
            cycle.redraw(before)
        recorder, loop = self._recorder, self._loop
        standing = recorder.stand()
        count, begun, places, columns, sums, arrivals = _templates.repeat(
            events,
            cycle.words,
            cycle.masks,
            cycle.deeds,
            standing,
            cycle.phases,
            OTHER,
            loop.train_steps if cycle.kind == TRAIN else loop.validate_steps,
            recorder.wall_offset,
        )
        if count:
            recorder.stand_at(standing, cycle.stretch(count, places, columns, sums))
            if cycle.arrives:
                recorder.arrivals.take_in(memoryview(arrivals)[: count * STEP_BYTES])
            loop.count_on(cycle.counted, count)
            if cycle.ready:
                at = ((count - 1) * cycle.length + cycle.ready[-1]) * _EVENT_BYTES
                loop.ready = (unpack_from("=8xq", events, at)[0] >> on_tape.ARGUMENT_SHIFT) - 1
        return count * cycle.length * _EVENT_BYTES, begun

    def _standing(self) -> tuple[object, ...] | None:
        standing = self._recorder.standing()
        return None if standing is None else (*standing, *self._loop.standing())
