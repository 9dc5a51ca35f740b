"""All hooks of one client, put on and taken off together."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchperfd.arrivals import ArrivalBook
from torchperfd.compilations import Compilations
from torchperfd.device import DeviceTimes
from torchperfd.drawn_batches import DrawnBatches
from torchperfd.faults import Faults
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.gradient_times import GradientTimes
from torchperfd.hooks.patches import Patches
from torchperfd.interrupts import is_from_script
from torchperfd.iterators import Iterators
from torchperfd.loader_use import LoaderSampler, TimedDraw
from torchperfd.logs import log
from torchperfd.loop import Loop
from torchperfd.overhead import Overhead
from torchperfd.passes import Passes
from torchperfd.recorder import Recorder
from torchperfd.replay import Replay
from torchperfd.step_state import StepState
from torchperfd.tape import Tape

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.hooks.models import RootModels


class Hooks:
    """Installs everything once torch is there, and restores torch afterwards.

    Needs torch imported: nothing here runs before the script itself has done so.
    """

    def __init__(
        self,
        tape: Tape,
        replay: Replay,
        faults: Faults,
        sampler: LoaderSampler | None = None,
        iterators: Iterators | None = None,
    ) -> None:
        self._sampler = sampler or LoaderSampler()
        self._context = HookContext(tape, replay, faults)
        self._iterators = iterators or Iterators(tape)
        self._patches = Patches()
        self._handles: list[Any] = []
        self._models: RootModels | None = None

    @property
    def active(self) -> bool:
        """Whether events are being reported."""
        return self._context.active

    def install(self) -> None:
        """Put every hook on; one that this torch does not offer is logged and left out."""
        from torchperfd.hooks import (
            collectives,
            frames,
            gradients,
            loader,
            models,
            optimizers,
            reductions,
            saves,
            scaler,
        )

        # The training thread reads the tape along, at times, inside of what dynamo watches.
        frames.keep_classes_out_of_graphs(
            *(Loop, Recorder, ArrivalBook, Replay, Passes, Overhead, DeviceTimes, HookContext),
            *(Iterators, DrawnBatches, StepState, LoaderSampler, TimedDraw),
            *(Patches, models.RootModels, reductions.Reductions, GradientTimes, Compilations),
        )
        context, patches, sampler = self._context, self._patches, self._sampler
        self._models = roots = models.RootModels(context, patches)
        writers = saves.Saves(context, patches)
        backward = gradients.timed_backward(context)
        hooks: tuple[tuple[str, Callable[[], None]], ...] = (
            (
                "DataLoader",
                lambda: loader.install(context, patches, roots, self._iterators, writers.look, sampler),
            ),
            ("gradients", lambda: gradients.install(context, patches, backward, roots)),
            ("optimizers", lambda: self._handles.extend(optimizers.install(context, roots))),
            ("GradScaler", lambda: scaler.install(context, patches)),
            ("compile", roots.install),
            ("optimizers' models", roots.watch_optimizers),
            ("load", roots.watch_loading),
            ("checkpoint", writers.install),
            ("collectives", collectives.Collectives(context, patches).install),
            ("reductions", reductions.Reductions(context, patches, backward).install),
        )
        for name, put_on in hooks:
            try:
                put_on()
            except (AttributeError, ImportError, KeyError) as error:
                if is_from_script(error):
                    raise
                log.warning(
                    "this torch has no place for the %s hook (%s); its phase stays empty", name, error
                )

    def add_model(self, model: "nn.Module") -> None:
        """Time the forward of a model that the caller names, instead of searching for it."""
        if self._models is not None:
            self._models.add(model)

    def uninstall(self) -> None:
        """Take every hook off and put every original back."""
        self._context.silence()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models = None
        self._patches.undo()
