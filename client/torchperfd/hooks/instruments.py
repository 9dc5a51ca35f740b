"""The instruments: all that measures this process, from the hooks into torch to the totals' sources.

Each hook is imported, made and put on by itself.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torchperfd.events import OUTDATED, EventBuffer, codes
from torchperfd.hooks.accelerator import Accelerator, read_cuda_memory
from torchperfd.hooks.batches import counts_itself, samples_in
from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.compiler import Compilations
from torchperfd.hooks.context import HookContext, HookLinks, Models, describe
from torchperfd.hooks.line_times import ScriptCollectives, SyncWaits
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.patches import ModuleImport, keep_classes_out_of_graphs, when_imported
from torchperfd.hooks.pauses import FitPauses, GcPauses
from torchperfd.hooks.process_groups import read_coordinates
from torchperfd.hooks.profiler import ARBITER, is_profiling
from torchperfd.hooks.worker_stacks import WorkerStacks
from torchperfd.model.host_memory import MemoryReader
from torchperfd.model.process import (
    ANOMALY_DETECTION,
    DETERMINISTIC,
    TORCH_PROFILER,
    UNBOUND,
    HookState,
    ProcessSettings,
    available_cpus,
)
from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.steps.epochs import EpochStarts, Iterators
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.phases import DATA, PhaseNames, StepBatch
from torchperfd.steps.replay import Replay
from torchperfd.steps.totals import Totals
from torchperfd.steps.wrapped import WrappedIterator

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


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


class ProcessCounters:
    """Reads the counters of the loop, the garbage collector, the compiler and the device; no lock."""

    def __init__(self, instruments: "Instruments") -> None:
        self._instruments = instruments
        self._links = instruments.hooks.links
        self._replay = instruments.replay
        self._pauses = FitPauses(instruments.pauses)
        self._began_ns = 0
        self._cpus = 0.0
        self._epoch_starts = EpochStarts()
        self._memory = MemoryReader()

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._replay.loop.saving > 0

    def fill(self, totals: Totals, *, samples: bool = True) -> None:
        """Update the totals, after the drained steps were added. They may be a step ahead of those.

        Args:
            samples: Whether to have another draw sampled, and more events recorded on the device: their cost
                is per flush.
        """
        loop, epochs, overhead = self._replay.loop, self._replay.epochs, self._replay.overhead
        links, accelerator = self._links, self._instruments.accelerator
        totals.train.micro_batches = loop.micro_batches
        totals.train.skipped = loop.skipped
        totals.checkpoint = replace(loop.saves)
        self._count_pauses(totals)
        links.compilations.follow()
        totals.compiled = PhaseTotals(links.compilations.calls, links.compilations.ns)
        totals.graph_limit = links.compilations.graph_limit
        totals.background_saves = PhaseTotals(links.background_saves.calls, links.background_saves.ns())
        totals.loader_ready = loop.ready if loop.ready >= 0 else None
        totals.train.tokens, totals.warmup.tokens = loop.tokens, loop.warmup_tokens
        totals.epoch_starts = replace(self._epoch_starts.totals)
        totals.epoch = replace(epochs.epoch)
        totals.train_pass = replace(epochs.train)
        totals.validate_pass = replace(epochs.validate)
        totals.overhead, totals.degradation_level = overhead.ratio, overhead.degradation_level
        totals.cuda = read_cuda_memory()
        totals.host_memory = self._memory.read()
        totals.flops_per_step, totals.peak_flops = accelerator.flops()
        totals.script_collectives = links.script_collectives.longest()
        totals.hooks = self._instruments.hook_states()
        # Once the script has ended its process groups, nothing shows the place any more.
        totals.coordinates = read_coordinates(links.places) or totals.coordinates
        if accelerator.is_timed:
            sync_waits = self._instruments.sync_waits
            sync_waits.start(self._replay.thread)
            totals.sync_waits = sync_waits.waits(totals.train, totals.validate)
            totals.device_work = PhaseTotals(*accelerator.work)
        self.fill_loader(totals)
        if not samples:
            return
        links.loader_sampler.arm()
        for spent in accelerator.times():
            phase = totals.of(spent.kind).phases[spent.phase]
            phase.device_ns += spent.ns
            phase.device_calls += spent.calls

    def add_steps(self, drained: Sequence[StepBatch]) -> None:
        """Add the steps that were drained just now, ahead of :meth:`fill`."""
        begun = self._replay.epochs.begun
        count = len(begun)
        self._epoch_starts.add(drained, begun[:count], self._links.loader_sampler.workers)
        del begun[:count]

    def fill_loader(self, totals: Totals) -> None:
        """Bring what is known of the loader up to date, and what is sampled beside it."""
        train, settings = totals.train, self._links.settings
        totals.loader = self._links.loader_sampler.use(
            train.phases[DATA].calls / train.steps if train.steps else 0.0, train.steps
        )
        totals.threads, totals.switches = settings.threads, settings.switches
        totals.binding = settings.binding or UNBOUND
        self._cpus = self._cpus or available_cpus()
        totals.cpus = min(self._cpus, totals.binding.allowed or self._cpus)

    def _count_pauses(self, totals: Totals) -> None:
        # Steps have Unix times, collections those of the monotonic clock. The wall clock may be set during
        # training: the start is converted once, while the offset is that of the first step.
        offset = self._replay.recorder.wall_offset
        if totals.began_ns and not self._began_ns:
            self._began_ns = totals.began_ns - offset
        self._pauses.settle(self._began_ns, totals.ended_ns - offset)
        totals.gc = tuple(
            GcTotals(calls, ns) for calls, ns in zip(self._pauses.calls, self._pauses.ns, strict=True)
        )
        totals.collect_calls = self._pauses.longest_calls


_BUFFER_EVENTS: Final = 131_072
_RING_STEPS: Final = 4096
_SAMPLER_STOP_S: Final = 0.1


class Instruments:
    """Puts the parts that measure together; torch is touched once it has been imported.

    Args:
        inert: Take next to no memory, and measure nothing.
        max_overhead: See :func:`torchperfd.attach`.
        peak_flops: Operations per second that the device can do; looked up when None.
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
        self.accelerator = Accelerator(self.replay, self.faults, count_flops=flops, peak_flops=peak_flops)
        self.hooks = Hooks(self.buffer, self.replay, self.faults)
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
        self._pending_torch = when_imported("torch", torch_is_there)

    def uninstall(self) -> None:
        """Take everything off again; what was measured stays."""
        if self._pending_torch is not None:
            self._pending_torch.cancel()
        self.hooks.uninstall()
        self.pauses.uninstall()
        self.hooks.links.compilations.uninstall()
        self.accelerator.end("training ended before a step was counted")
        self.sync_waits.stop(_SAMPLER_STOP_S)
        self.buffer.thread = 0

    def wrap(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate over something, timing each ``next()`` as ``data``."""
        begin, count = self._guarded(self.hooks.links.iterators.begin, None), self._guarded(samples_in, 0)
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
