"""All hooks of one client: each is imported, made and put on by itself."""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torchperfd.events import EventBuffer
from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.compiler import Compilations
from torchperfd.hooks.context import HookContext, HookLinks, Models, describe
from torchperfd.hooks.line_times import ScriptCollectives
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.profiler import ARBITER, is_profiling
from torchperfd.hooks.worker_stacks import WorkerStacks
from torchperfd.model.process import (
    ANOMALY_DETECTION,
    DETERMINISTIC,
    TORCH_PROFILER,
    HookState,
    ProcessSettings,
)
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults
from torchperfd.steps.epochs import Iterators
from torchperfd.steps.replay import Replay

if TYPE_CHECKING:
    from torch import nn

HOOKS: Final = {
    # Those that others build on come first.
    "compiler": "compiler",
    "closures": "optimizers",
    "models": "models",
    "forward": "passes",
    "compiled_models": "passes",
    "replicas": "passes",
    "modes": "passes",
    "new_optimizers": "optimizers",
    "loaded_models": "models",
    "loader": "loader",
    "index_lists": "loader",
    "iterators": "loader",
    "worker_queue": "loader_samples",
    "loader_use": "loader_use",
    "worker_entry": "loader",
    "backward": "passes",
    "zero_grad": "optimizers",
    "optimizers": "optimizers",
    "grad_scaler": "optimizers",
    "checkpoints": "checkpoints",
    "collectives": "distributed",
    "functional_collectives": "distributed",
    "ddp_buffers": "distributed",
    "reductions": "passes",
    "compilations": "compiler",
    "device_meshes": "distributed",
    "pipeline_stages": "distributed",
    "tensor_parallel": "distributed",
}
"""The module of each hook, by the hook's name: a module of this package with ``install_NAME(context)``."""


class Hooks:
    """Puts every hook on once torch is there, and restores torch afterwards.

    :meth:`install` needs torch imported: it is called after the script itself has done so.
    """

    def __init__(self, buffer: EventBuffer, replay: Replay, faults: Faults) -> None:
        self._buffer = buffer
        worker_stacks = WorkerStacks()
        self.links = HookLinks(
            iterators=Iterators(buffer),
            loader_sampler=LoaderSampler(worker_stacks),
            compilations=Compilations(),
            background_saves=BackgroundSaves(),
            worker_stacks=worker_stacks,
            settings=ProcessSettings(),
            script_collectives=ScriptCollectives(),
        )
        self._contexts = [HookContext(name, buffer, replay, faults, self.links) for name in HOOKS]
        self._is_installed = False
        self._named_model: nn.Module | None = None

    @property
    def states(self) -> tuple[HookState, ...]:
        """Which hooks are on, and why one is not; empty before they are put on."""
        if not self._is_installed:
            return ()
        return tuple(HookState(context.name, context.reason) for context in self._contexts)

    def install(self) -> None:
        """Put every hook on; one that this torch does not offer is logged and left out."""
        torch = sys.modules["torch"]
        self.links.settings.install(torch.get_num_threads, switch_checks(torch))
        for context in self._contexts:
            try:
                name = HOOKS[context.name]
                if name == "distributed" and not torch.distributed.is_available():
                    continue
                module = importlib.import_module(f"torchperfd.hooks.{name}")
                getattr(module, f"install_{context.name}")(context)
            except Exception as error:
                if is_from_script(error):
                    raise
                context.turn_off(describe(error))
        self._is_installed = True
        if self._named_model is not None:
            self.add_model(self._named_model)

    def add_model(self, model: "nn.Module") -> None:
        """Time the forward of a model that the caller names, now or once the hooks are on."""
        self._named_model = model
        links = self.links
        if not self._is_installed:
            return
        if type(links.models) is not Models:
            links.models.add(model)
        elif links.time_forward is not None:
            links.time_forward(model)

    def uninstall(self) -> None:
        """Take every hook off and put every original back."""
        self._buffer.thread = 0  # from here on they pass through
        for context in reversed(self._contexts):
            context.take_off()


def switch_checks(torch: Any) -> dict[str, Callable[[], bool]]:
    """Return by the name of each of torch's debugging switches a function that returns whether it is on."""
    return {
        ANOMALY_DETECTION: getattr(torch, "is_anomaly_enabled", bool),
        DETERMINISTIC: getattr(torch, "are_deterministic_algorithms_enabled", bool),
        TORCH_PROFILER: lambda: is_profiling() and not ARBITER.is_ours_on,
    }
