"""Event handlers: what the replay calls for each event, by its code."""

from collections.abc import Callable

from torchperfd.events import codes
from torchperfd.steps.epochs import EpochTracker
from torchperfd.steps.loop import Loop
from torchperfd.steps.phase_stack import Clock
from torchperfd.steps.phases import BACKWARD, DATA
from torchperfd.steps.recorder import Recorder


class EventHandlers:
    """Passes events to a loop, with what their codes and arguments mean.

    Attributes:
        by_code: The handlers; each takes the event's argument.
    """

    def __init__(self, clock: Clock, loop: Loop, recorder: Recorder, epochs: EpochTracker) -> None:
        self._clock = clock
        self._loop = loop
        self._recorder = recorder
        self._epochs = epochs
        # Of the calls that are under way, how deep phases were nested before, and optimizer calls.
        self._calls: list[tuple[int, int, int]] = []
        handlers: dict[int, Callable[[int], None]] = {
            codes.DRAW: self._draw,
            codes.CLOSURE_DRAW: lambda _: loop.closure_draw_begin(),
            codes.DRAWN: loop.draw_end,
            codes.EXHAUSTED: self._exhausted,
            codes.FORWARD: lambda _: loop.forward_begin(True),
            codes.EVALUATE: self._evaluate,
            codes.FORWARD_END: lambda _: loop.forward_end(),
            codes.BACKWARD: self._backward,
            codes.BACKWARD_END: lambda _: loop.backward_end(self._depth_before()),
            codes.ZERO: self._zero,
            codes.ZERO_END: self._leave,
            codes.OPTIMIZER: loop.optimizer_begin,
            codes.OPTIMIZER_END: loop.optimizer_end,
            codes.STALE: lambda _: recorder.unwind(),
            codes.ELSEWHERE: loop.stepped_elsewhere,
            codes.SCALER: self._scaler,
            codes.SCALER_END: self._scaler_end,
            codes.SCALER_FAILED: self._leave,
            codes.SAVE: self._save,
            codes.SAVE_END: lambda _: loop.save_end(self._depth_before()),
            codes.ENTER: loop.enter,
            codes.EXIT: lambda _: loop.exit(),
            codes.STEP: lambda samples: loop.client_step(samples),
            codes.SAMPLES: loop.count,
            codes.OUTER_DRAW: self._draw,
            codes.OUTER_DRAWN: loop.draw_end,
            codes.BETWEEN: lambda _: loop.finish(),
            codes.ADOPT: self._adopt,
            codes.ABANDON: lambda _: self.abandon(),
            codes.CUDA_EVENT: self._cuda_event,
            codes.READY: self._ready,
            codes.TOKENS: self._tokens,
            codes.COLLECTIVE: self._collective,
            codes.COLLECTIVE_END: self._leave,
            codes.REDUCTION: self._reduction,
            codes.PASS: lambda _: loop.pass_begins(),
            codes.LEFT: self._iterator_left,
            codes.NOT_TRAINING: recorder.leave_out,
            codes.OPTIMIZER_MADE: loop.optimizer_made,
            codes.EVALUATION_MODE: lambda _: loop.evaluation_mode(),
            codes.TRAINING_MODE: lambda _: loop.training_mode(),
        }
        self.by_code = [handlers[code] for code in range(codes.CODES)]

    def abandon(self) -> None:
        """Forget the open step, and the calls that are under way: their ends may never come."""
        self._calls.clear()
        self._loop.abandon()

    def _draw(self, argument: int) -> None:
        loop, iterator = self._loop, argument & codes.ITERATOR_MASK
        outermost = not self._recorder.inside(DATA)
        loop.draw_begin(
            iterator,
            gradients=not argument & codes.DRAW_WITHOUT_GRADIENTS,
            evaluation_mode=bool(argument & codes.DRAW_IN_EVALUATION),
        )
        if outermost and iterator:
            self._epochs.draw(iterator, self._clock.now, loop.train_steps, loop.validate_steps)

    def _exhausted(self, iterator: int) -> None:
        loop = self._loop
        loop.draw_stop(iterator)
        if not self._recorder.inside(DATA):
            self._epochs.exhausted(iterator, self._clock.now, loop.train_steps, loop.validate_steps)

    def _iterator_left(self, argument: int) -> None:
        iterator = argument & codes.ITERATOR_MASK
        is_gone = not argument & codes.LEFT_NAMED
        self._loop.left(iterator, for_sure=is_gone)
        if is_gone:
            self._epochs.left(iterator, self._loop.train_steps)

    def _evaluate(self, argument: int) -> None:
        self._loop.forward_begin(
            False,
            evaluation_mode=not argument & codes.EVALUATE_IN_TRAINING_MODE,
            backward_may_follow=bool(argument & codes.EVALUATE_WITH_GRADIENTS),
        )

    def _ready(self, following: int) -> None:
        self._loop.ready = following - 1

    def _tokens(self, tokens: int) -> None:
        self._loop.tokens += tokens

    def _cuda_event(self, following: int) -> None:
        self._recorder.cuda_event_id = following - 1

    def _call(self, optimizer: int = 0) -> None:
        self._calls.append((self._recorder.depth, optimizer, self._loop.optimizer_calls))

    def _depth_before(self) -> int:
        # None under way: it was begun before a failure made us forget.
        return self._calls.pop()[0] if self._calls else self._recorder.depth

    def _leave(self, _: int) -> None:
        self._loop.leave(self._depth_before())

    def _backward(self, _: int) -> None:
        self._call()
        self._loop.backward_begin()

    def _zero(self, _: int) -> None:
        self._call()
        self._loop.zero_begin()

    def _scaler(self, optimizer: int) -> None:
        self._call(optimizer)
        self._loop.optimizer_begin(optimizer)

    def _scaler_end(self, _: int) -> None:
        if self._calls:
            depth, optimizer, calls = self._calls.pop()
            self._loop.leave(depth + 1)
            # The scaler's own call is one; a further one means that the optimizer stepped.
            self._loop.optimizer_end(optimizer, called_off=self._loop.optimizer_calls == calls + 1)

    def _save(self, _: int) -> None:
        self._call()
        self._loop.save_begin()

    def _collective(self, ago: int) -> None:
        self._call()
        self._loop.recorder.arrive(ago)

    def _reduction(self, ago: int) -> None:
        # It has no end of its own: the backward's is.
        if self._recorder.inside(BACKWARD):
            self._loop.recorder.arrive(ago)

    def _adopt(self, _: int) -> None:
        self._calls.clear()
        self._loop.adopt()
