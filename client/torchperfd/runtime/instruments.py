"""The instruments: all that measures this process, from the hooks into torch to the totals' sources."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from torchperfd.device.accelerator import Accelerator
from torchperfd.device.sync_waits import SyncWaits
from torchperfd.events import OUTDATED, EventBuffer, codes
from torchperfd.hooks import Hooks
from torchperfd.hooks.batches import counts_itself, samples_in
from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.compiler import Compilations
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.patches import ModuleImport, keep_classes_out_of_graphs, when_torch_is_imported
from torchperfd.hooks.pauses import GcPauses
from torchperfd.hooks.script_collectives import ScriptCollectives
from torchperfd.model.process import HookState, ProcessSettings
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.stacks.worker_stacks import WorkerStacks
from torchperfd.steps.epochs import Iterators
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.replay import Replay
from torchperfd.steps.wrapped import WrappedIterator

T = TypeVar("T")

_BUFFER_EVENTS: Final = 131_072
_RING_STEPS: Final = 4096
_SAMPLER_STOP_S: Final = 0.1


class Instruments:
    """Puts the parts that measure together; torch is touched once it has been imported.

    Args:
        inert: Take next to no memory, and measure nothing.
        max_overhead: See :func:`torchperfd.attach`.
        flops: Count the operations of a training step.
        peak_flops: Operations per second that the device can do; looked up when None.

    Attributes:
        faults: Where failures of ours are counted.
        names: Phase names.
        buffer: What hooks write to.
        replay: Reads it.
        pauses: Pauses of the garbage collector.
        compilations: What torch.compile takes.
        background_saves: Checkpoints that are saved beside the steps.
        settings: Threads and switches of the process.
        script_collectives: Counts the collectives that the script starts itself.
        loader: Samples how the loader is used.
        worker_stacks: Reads the stacks of the loader's workers.
        accelerator: Times the device.
        sync_waits: Samples where the training thread waits for the device.
        hooks: Where torch is touched.
    """

    def __init__(
        self, *, inert: bool, max_overhead: float | None, flops: bool, peak_flops: float | None
    ) -> None:
        self.faults = Faults()
        self.names = PhaseNames()
        self.buffer = EventBuffer(16 if inert else _BUFFER_EVENTS, codes.CUDA_EVENT)
        if inert:
            self.buffer.thread = 0
        self.sync_waits = SyncWaits(self.faults)
        overhead = Overhead(
            self.buffer,
            max_overhead,
            thread_clock=lambda: time.thread_time() + self.sync_waits.cpu_seconds,
        )
        self.replay = Replay(self.buffer, 16 if inert else _RING_STEPS, self.faults, overhead)
        self.pauses = GcPauses()
        self.compilations = Compilations()
        self.background_saves = BackgroundSaves()
        self.worker_stacks = WorkerStacks()
        self.settings = ProcessSettings()
        self.script_collectives = ScriptCollectives()
        self.loader = LoaderSampler(self.worker_stacks)
        self.accelerator = Accelerator(self.replay, self.faults, count_flops=flops, peak_flops=peak_flops)
        self._iterators = Iterators(self.buffer)
        self.hooks = Hooks(
            self.buffer,
            self.replay,
            self.faults,
            self.loader,
            self._iterators,
            self.compilations,
            self.background_saves,
            self.worker_stacks,
            self.settings,
            self.script_collectives,
        )
        self._pending_torch: ModuleImport | None = None

    def hook_states(self) -> tuple[HookState, ...]:
        """Return which hooks are on, and why one is not; empty until torch has been imported."""
        states, flops = self.hooks.states, self.accelerator.flops_state
        return states if flops is None else (*states, flops)

    def install(self, then: Callable[[], None], untraced: type) -> None:
        """Put the hooks on as soon as torch has been imported, now or later.

        Args:
            then: Called afterwards.
            untraced: A class whose methods hooks may run: they are kept out of compiled graphs as well.
        """

        def torch_is_there() -> None:
            try:
                keep_classes_out_of_graphs(untraced)
                self.hooks.install()
                self.accelerator.watch()
            except BaseException as error:  # runs inside the script's `import torch`
                self.hooks.uninstall()
                if is_from_script(error):
                    raise
                self.faults.note("hooks", error)
            then()

        if OUTDATED:
            log.warning(
                "hooks run in Python, at ten times the cost: %s; install it again from its checkout, with "
                "`pip install --force-reinstall --no-deps .` or `pip install -e .`",
                OUTDATED,
            )
        self.pauses.install()
        self._pending_torch = when_torch_is_imported(torch_is_there)

    def uninstall(self) -> None:
        """Take everything off again; what was measured stays."""
        if self._pending_torch is not None:
            self._pending_torch.cancel()
        self.hooks.uninstall()
        self.pauses.uninstall()
        self.compilations.uninstall()
        self.accelerator.end("training ended before a step was counted")
        self.sync_waits.stop(_SAMPLER_STOP_S)
        self.buffer.thread = 0

    def wrap(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate over something, timing each ``next()`` as ``data``."""
        begin, count = self._guarded(self._iterators.begin, None), self._guarded(samples_in, 0)
        exact = self._guarded(counts_itself, False)(iterable)
        return WrappedIterator(iterable, self.buffer, begin, (lambda _: 0) if exact else count)

    @property
    def advice(self) -> str:
        """What to do where training was seen but no step of it, in one line; empty where steps were seen."""
        loop = self.replay.loop
        if loop.train_steps:
            return ""
        if loop.backward_calls:
            return (
                f"{loop.backward_calls} backward passes were seen, but no optimizer of torch's that stepped: "
                "call client.step() once per training step, or use the framework's integration"
            )
        if loop.validate_steps or "torch" not in sys.modules:
            return ""
        if loop.draws:
            return (
                "batches were drawn, but no backward pass and no optimizer step was seen: if the script "
                "trains with torch.func or updates parameters itself, call client = torchperfd.attach() "
                "once, and client.step(samples=...) at the end of each training step"
            )
        words = (
            "no backward pass was seen in this process: if it starts processes that train, call "
            "torchperfd.attach() in the function that they run"
        )
        # A launcher has started this one.
        return words if os.environ.get("LOCAL_RANK") else f"{words}, or start them with torchrun"

    def _guarded(self, function: Callable[[object], T], otherwise: T) -> Callable[[object], T]:
        """Return a function for a wrapped iterator to call: a failure of ours gives ``otherwise``."""

        def call(argument: object) -> T:
            try:
                return function(argument)
            except Exception as error:
                if is_from_script(error):
                    raise
                self.faults.note("wrap", error)
                return otherwise

        return call
