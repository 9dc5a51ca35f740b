"""Step templates: the result of one step, reused for later steps with the same sequence of events.

The loop's decision on an event depends on the events so far, never on their times. A step that ends in
the state in which it began is therefore a template for every later step with the same events. C code
(``_templates.c``) applies it to all such steps at once, in a thirtieth of the time that handling event by
event takes from the training thread. Without the C module every event is handled by itself.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from struct import calcsize, unpack_from
from typing import Any, Final

from torchperfd._version import NATIVE_ABI
from torchperfd.events import codes
from torchperfd.steps.loop import Loop
from torchperfd.steps.phase_stack import MAX_DEPTH
from torchperfd.steps.phases import (
    AFTER_EVALUATION,
    COLLECTIVE_WAIT,
    OTHER,
    TRAIN,
    PhaseColumns,
    StepBatch,
    slot_after_evaluation,
)
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import ARRIVAL_BYTES

try:
    from torchperfd.steps import _templates
except ImportError:
    _templates = None  # type: ignore[assignment]

AVAILABLE: Final = getattr(_templates, "ABI", "") == NATIVE_ABI
"""Whether there is a C module, and of this version."""

_DONE, _ENTER, _EXIT, _NAME_GAP, _COUNT, _CLOSE, _ARRIVE = range(7)
# Events of which the loop does the same with any argument: how many samples, how many batches wait, how long
# ago a collective was come to; and nothing at all with what was written twice.
_ANY_ARGUMENT: Final = frozenset((codes.DRAWN, codes.READY, codes.COLLECTIVE, codes.REDUCTION))

_EVENT_BYTES: Final = calcsize(codes.EVENT_FORMAT)
_MAX_EVENTS: Final = 4096
_MAX_KNOWN: Final = 8
_ALL_BITS: Final = -1

# Events that have the loop do something to the recorder, and nothing to anything else that time or a
# count could change. Not in here: what begins, ends or disturbs a loop, and what goes with a device.
_REPEATABLE: Final = frozenset(
    (
        *(codes.DRAW, codes.DRAWN, codes.READY, codes.TOKENS),
        *(codes.FORWARD, codes.EVALUATE, codes.FORWARD_END),
        *(codes.BACKWARD, codes.BACKWARD_END, codes.ZERO, codes.ZERO_END),
        *(codes.OPTIMIZER, codes.OPTIMIZER_END, codes.SCALER, codes.SCALER_END),
        *(codes.ENTER, codes.EXIT, codes.STEP),
        *(codes.COLLECTIVE, codes.COLLECTIVE_END, codes.REDUCTION),
    )
)

_READ: Final = frozenset(("depth", "gap", "idle", "inside", "is_open", "is_paused"))
"""What the loop only asks of the recorder."""


class TemplateRecorder:
    """Replaces the recorder during one step, and records the operations that the loop asks it for."""

    def __init__(self, recorder: Recorder) -> None:
        self.plain = True
        """Whether all of it can be repeated."""
        self.words: list[int] = []
        self.ops = bytearray()
        self.kind = 0
        self._recorder = recorder

    def event(self, word: int) -> None:
        if self.words:
            self.end()
        self.words.append(word)
        self.plain &= word & codes.CODE_MASK in _REPEATABLE and len(self.words) < _MAX_EVENTS

    def end(self) -> None:
        self.ops += bytes((_DONE, 0))

    # What the loop calls, and can be repeated.

    def enter(self, phase: int) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth < MAX_DEPTH
        self.ops += bytes((_ENTER, phase))
        self._recorder.enter(phase)

    def push(self, phase: int) -> None:
        self.enter(phase) if self._recorder.is_open else self._recorder.push(phase)

    def arrive(self, ago: int = 0) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth < MAX_DEPTH
        self.plain &= ago == self.words[-1] >> codes.ARGUMENT_SHIFT
        self.ops += bytes((_ARRIVE, COLLECTIVE_WAIT))
        self._recorder.arrive(ago)

    def exit(self) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open and self._recorder.depth <= MAX_DEPTH
        if self._recorder.depth:
            self.ops += bytes((_EXIT, 0))
        self._recorder.exit()

    def name_gap(self, phase: int) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= self._recorder.is_open
        self.ops += bytes((_NAME_GAP, phase))
        self._recorder.name_gap(phase)

    def close(self, kind: int, index: int, *, count: int = 1, at_last: bool = False) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= count == 1 and not at_last and not self.kind
        self.kind = kind
        self.ops += bytes((_CLOSE, kind))
        self._recorder.close(kind, index, count=count, at_last=at_last)

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
        self.plain &= samples - self._recorder.samples == self.words[-1] >> codes.ARGUMENT_SHIFT
        self.ops += bytes((_COUNT, 0))
        self._recorder.samples = samples

    def assign_after_evaluation(self) -> None:
        """Name the phase of what follows a forward without gradients: the kind of the step is known now."""
        slot, operations = (
            slot_after_evaluation(self.kind),
            [*zip(self.ops[::2], self.ops[1::2], strict=True)],
        )
        if (_NAME_GAP, AFTER_EVALUATION) in operations:
            # Within the gap, a phase of the same name would not be a call.
            self.plain &= (_ENTER, slot) not in operations
            self.ops = bytearray(
                number
                for op, operand in operations
                for number in (op, slot if op == _NAME_GAP and operand == AFTER_EVALUATION else operand)
            )

    # What has no effect between steps that are repeated, reads, and what cannot be repeated.

    def leave_in(self) -> None:
        """See :class:`~torchperfd.steps.recorder.Recorder`."""
        self.plain &= not self._recorder.is_paused
        self._recorder.leave_in()

    def __getattr__(self, name: str) -> Any:
        self.plain &= name in _READ
        return getattr(self._recorder, name)


class StepTemplate:
    """A step that ends in the state in which it began.

    Args:
        recorder: The operations recorded during it.
        counted: By how much each of the loop's counts grew.
        around: Phases that it began in.
    """

    def __init__(self, recorder: TemplateRecorder, counted: dict[str, int], around: tuple[int, ...]) -> None:
        words = recorder.words
        entered = (
            operand
            for op, operand in zip(recorder.ops[::2], recorder.ops[1::2], strict=True)
            if op in (_ENTER, _NAME_GAP, _ARRIVE)
        )
        self.phases = bytes(sorted({OTHER, *around, *entered}))
        self.counted = counted
        self.kind = recorder.kind
        self.ops = bytes(recorder.ops)
        self.length = len(words)
        self.arrives = self.kind == TRAIN and _ARRIVE in self.ops[::2]
        self.draws = [n for n, word in enumerate(words) if word & codes.CODE_MASK == codes.DRAW]
        self.ready = [n for n, word in enumerate(words) if word & codes.CODE_MASK == codes.READY]
        self.words = array("q", words)
        self.masks = array("q", [_ALL_BITS]) * len(words)
        for number, word in enumerate(words):
            if word & codes.CODE_MASK in _ANY_ARGUMENT:
                self.masks[number] = codes.CODE_MASK
                self.words[number] = word & codes.CODE_MASK

    @property
    def draws_from_one(self) -> bool:
        """Whether all its batches come from one iterator; which one makes no difference then."""
        return len({self.words[number] for number in self.draws}) == 1

    def batch(
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

    def set_iterator(self, draw: int) -> None:
        """From now on its batches come from the iterator of that event."""
        for number in self.draws:
            self.words[number] = draw


class StepTemplates:
    """The step templates of one loop."""

    def __init__(self, loop: Loop, recorder: Recorder) -> None:
        self._loop = loop
        self._recorder = recorder
        self._known: OrderedDict[tuple[object, ...], StepTemplate] = OrderedDict()

    @contextmanager
    def learn(self) -> Iterator[TemplateRecorder | None]:
        """Record the step that is handled meanwhile, and keep it if it is a template.

        Yields None where it cannot be one.
        """
        around, state = self._recorder.state_key(), self._state_key()
        if around is None:
            yield None
            return
        before = self._loop.counts()
        recorder = TemplateRecorder(self._recorder)
        self._loop.recorder = recorder  # type: ignore[assignment]  # has all of it that the loop uses
        try:
            yield recorder
        finally:
            self._loop.recorder = self._recorder
        recorder.end()
        recorder.assign_after_evaluation()
        if state is not None and recorder.plain and recorder.kind and self._state_key() == state:
            counts = self._loop.counts()
            counted = {name: counts[name] - before[name] for name in counts}
            self._known[state] = StepTemplate(recorder, counted, around)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def repeat(self, events: memoryview, before: int) -> tuple[int, bool]:
        """Apply a known template to the next events, if they match.

        Args:
            before: Word of the event before it.

        Returns:
            How many bytes of events they are; whether nothing comes then but what begins like another.
        """
        state = self._state_key()
        cycle = self._known.get(state) if state is not None else None
        if cycle is None:
            return 0, False
        if cycle.draws_from_one and before & codes.CODE_MASK == codes.DRAW:
            cycle.set_iterator(before)
        recorder, loop = self._recorder, self._loop
        state_key = recorder.packed_state()
        count, begun, places, columns, sums, arrivals = _templates.repeat(
            events,
            cycle.words,
            cycle.masks,
            cycle.ops,
            state_key,
            cycle.phases,
            OTHER,
            loop.train_steps if cycle.kind == TRAIN else loop.validate_steps,
            recorder.wall_offset,
        )
        if count:
            recorder.reset_to(state_key, cycle.batch(count, places, columns, sums))
            if cycle.arrives:
                recorder.arrivals.take_in(memoryview(arrivals)[: count * ARRIVAL_BYTES])
            loop.count_on(cycle.counted, count)
            if cycle.ready:
                at = ((count - 1) * cycle.length + cycle.ready[-1]) * _EVENT_BYTES
                loop.ready = (unpack_from("=8xq", events, at)[0] >> codes.ARGUMENT_SHIFT) - 1
        return count * cycle.length * _EVENT_BYTES, begun

    def _state_key(self) -> tuple[object, ...] | None:
        state_key = self._recorder.state_key()
        return None if state_key is None else (*state_key, *self._loop.state_key())
