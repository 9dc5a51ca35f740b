"""torch.compile: counts compilations and their duration, and keeps our own methods out of compiled graphs."""

import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

from torchperfd.hooks.context import HookContext, Models
from torchperfd.hooks.patches import (
    Patches,
    keep_classes_out_of_graphs,
    keep_functions_out_of_graphs,
    skip_code,
)
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps import loop_conditions, loop_rules, step_edges
from torchperfd.steps.drawn_batches import DrawnBatches
from torchperfd.steps.epochs import EpochTracker, Iterators
from torchperfd.steps.event_handlers import EventHandlers
from torchperfd.steps.loop import Loop
from torchperfd.steps.loop_rules import Decision
from torchperfd.steps.loop_state import LoopState, StepState
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.phase_stack import PhaseStack
from torchperfd.steps.phases import HeldStep, StepRing
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.replay import Replay
from torchperfd.steps.step_series import ArrivalRecorder

_CALLBACK_MODULE: Final = "torch._dynamo.callback"
_LIMIT_LOG: Final = "torch._dynamo.convert_frame"
"""The module, and the name of its log."""
_LIMIT_MESSAGE: Final = "torch._dynamo hit config."
_LIMITED_FUNCTION: Final = re.compile(r"'([^']{1,200})' \((.{1,1000}):(\d{1,9})\)")
# The script may be about to import the module.
_MAX_CALLBACK_MISSES: Final = 60


def install_compilations(context: HookContext) -> None:
    """Count from now on; follow() does the rest once the script has imported the compiler."""
    keep_classes_out_of_graphs(Compilations)
    context.links.compilations.turn_off = context.turn_off
    context.links.compilations.follow()


class Compilations:
    """Counts compilations of graphs and what they took. Fixed memory, and no cost between them.

    The compiler calls back when it begins and when it has ended. It is never imported here: until the script
    has done so there is nothing to count.

    Attributes:
        calls: Compilations since :meth:`follow` has found the compiler.
        ns: Nanoseconds that they took, whichever thread waited.
        graph_limit: The first function that it has given up on, after too many graphs of it, such as
            ``forward() at model.py:12``: it runs without the compiler from then on. Empty for none.
        turn_off: Called with the reason where this torch has no such callbacks.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = self.ns = 0
        self.graph_limit = ""
        self._clock = clock
        self._began = 0
        self._over = False
        self._misses = 0
        self.turn_off: Callable[[str], None] = lambda _: None
        # One object each: a bound method is another one each time it is asked for.
        self._begin, self._end, self._note = self._note_begin, self._note_end, self._note_limit

    def follow(self) -> None:
        """Begin to count, once the script has imported the compiler; call it again and again.

        ``torch._dynamo.reset`` forgets all callbacks: the next call brings ours back.
        """
        if self._over:
            return
        lists = self._lists()
        for calls, callback in lists:
            if callback not in calls:
                calls.append(callback)
        if _LIMIT_LOG in sys.modules:
            # Nothing but a warning shows that a function has reached its limit. A second time does nothing.
            logging.getLogger(_LIMIT_LOG).addFilter(self._note)
        if len(lists) < 2 and _CALLBACK_MODULE in sys.modules:
            self._misses += 1
        if self._misses == _MAX_CALLBACK_MISSES:
            self._over = True
            self.turn_off(f"this torch has no start_callbacks and end_callbacks in {_CALLBACK_MODULE}")

    def uninstall(self) -> None:
        self._over = True
        logging.getLogger(_LIMIT_LOG).removeFilter(self._note)
        for calls, callback in self._lists():
            if callback in calls:
                calls.remove(callback)

    def _lists(self) -> "list[tuple[list[Callable[..., None]], Callable[..., None]]]":
        handler = getattr(sys.modules.get(_CALLBACK_MODULE), "callback_handler", None)
        found = (
            (getattr(handler, "start_callbacks", None), self._begin),
            (getattr(handler, "end_callbacks", None), self._end),
        )
        return [(calls, callback) for calls, callback in found if isinstance(calls, list)]

    def _note_limit(self, record: logging.LogRecord) -> bool:
        """Read a warning of the compiler; return that it is to be logged."""
        if not self.graph_limit and str(record.msg).startswith(_LIMIT_MESSAGE):
            found = _LIMITED_FUNCTION.search(" ".join(map(str, record.args or ())))
            self.graph_limit = (
                f"{found[1]}() at {PurePath(found[2]).name}:{found[3]}" if found else "a function"
            )
        return True

    def _note_begin(self, *_: object) -> None:
        self._began = self._clock()

    def _note_end(self, *_: object) -> None:
        # Without a beginning it was under way when we came.
        if self._began:
            self.ns += self._clock() - self._began
            self.calls += 1
            self._began = 0


def install_compiler(_context: HookContext) -> None:
    """Keep the methods that run on the training thread out of compiled graphs.

    It reads the ring buffer along, at times, inside of what dynamo watches.
    """
    skip_code(HookContext.absorb.__code__)
    for module in (loop_conditions, loop_rules, step_edges):
        keep_functions_out_of_graphs(module)
    keep_classes_out_of_graphs(
        *(Loop, LoopState, Decision, PhaseStack, Recorder, StepRing, HeldStep, ArrivalRecorder),
        *(Replay, EventHandlers, EpochTracker, Overhead, PhaseTotals),
        *(HookContext, Models, Patches, Iterators, DrawnBatches, StepState),
    )
