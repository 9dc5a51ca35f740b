"""Compiled code: what hooks call adds no graph of its own."""

from torchperfd import loop_conditions, loop_rules, step_edges
from torchperfd.arrivals import ArrivalBook
from torchperfd.device import DeviceTimes
from torchperfd.drawn_batches import DrawnBatches
from torchperfd.hooks.context import HookContext, Models
from torchperfd.hooks.frames import keep_classes_out_of_graphs, keep_functions_out_of_graphs, skip_code
from torchperfd.hooks.patches import Patches
from torchperfd.iterators import Iterators
from torchperfd.loop import Loop
from torchperfd.loop_rules import Decision
from torchperfd.loop_state import LoopState
from torchperfd.overhead import Overhead
from torchperfd.passes import Passes
from torchperfd.recorder import Recorder
from torchperfd.replay import Replay
from torchperfd.step_state import StepState


def install(_context: HookContext) -> None:
    """Keep the methods that run on the training thread out of compiled graphs.

    It reads the tape along, at times, inside of what dynamo watches.
    """
    skip_code(HookContext.absorb.__code__)
    for module in (loop_conditions, loop_rules, step_edges):
        keep_functions_out_of_graphs(module)
    keep_classes_out_of_graphs(
        *(Loop, LoopState, Decision, Recorder, ArrivalBook, Replay, Passes, Overhead, DeviceTimes),
        *(HookContext, Models, Patches, Iterators, DrawnBatches, StepState),
    )
