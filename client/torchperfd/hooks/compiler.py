"""Compiled code: what hooks call adds no graph of its own."""

from torchperfd.hooks.context import HookContext, Models
from torchperfd.hooks.frames import keep_classes_out_of_graphs, keep_functions_out_of_graphs, skip_code
from torchperfd.hooks.patches import Patches
from torchperfd.steps import loop_conditions, loop_rules, step_edges
from torchperfd.steps.arrivals import ArrivalRecorder
from torchperfd.steps.drawn_batches import DrawnBatches
from torchperfd.steps.epochs import EpochTracker
from torchperfd.steps.event_handlers import EventHandlers
from torchperfd.steps.held_step import HeldStep
from torchperfd.steps.iterators import Iterators
from torchperfd.steps.loop import Loop
from torchperfd.steps.loop_rules import Decision
from torchperfd.steps.loop_state import LoopState
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.replay import Replay
from torchperfd.steps.step_ring import StepRing
from torchperfd.steps.step_state import StepState


def install(_context: HookContext) -> None:
    """Keep the methods that run on the training thread out of compiled graphs.

    It reads the ring buffer along, at times, inside of what dynamo watches.
    """
    skip_code(HookContext.absorb.__code__)
    for module in (loop_conditions, loop_rules, step_edges):
        keep_functions_out_of_graphs(module)
    keep_classes_out_of_graphs(
        *(Loop, LoopState, Decision, Recorder, StepRing, HeldStep, ArrivalRecorder),
        *(Replay, EventHandlers, EpochTracker, Overhead),
        *(HookContext, Models, Patches, Iterators, DrawnBatches, StepState),
    )
