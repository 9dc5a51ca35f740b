"""Process counters: the parts of the totals that do not come from steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchperfd.device.accelerator import Accelerator
from torchperfd.device.sync_waits import SyncWaits
from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.compiler import Compilations
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.pauses import FitPauses, GcPauses
from torchperfd.hooks.script_collectives import ScriptCollectives
from torchperfd.model.process import UNBOUND, Coordinate, HookState, ProcessSettings, read_host_memory
from torchperfd.steps.cpus import available_cpus
from torchperfd.steps.epochs import EpochStarts
from torchperfd.steps.phases import DATA, StepBatch
from torchperfd.steps.replay import Replay
from torchperfd.steps.totals import GcTotals, PhaseTotals, Totals


class ProcessCounters:
    """Reads the counters of the loop, the garbage collector, the compiler and the device; no lock.

    Args:
        replay: Whose loop, passes and overhead to read.
        pauses: The garbage collector's.
        compilations: The compiler's.
        background_saves: Those of checkpoints beside the steps.
        accelerator: Device memory, times and FLOPs.
        loader: Samples how the loader is used.
        sync_waits: Samples where the training thread waits for the device.
        settings: Threads, CPUs and switches of the process.
        script_collectives: Counts the collectives that the script starts itself.
        hooks: Returns which hooks are on.
        coordinates: Returns the rank's place in each dimension of its job.
    """

    def __init__(
        self,
        replay: Replay,
        pauses: GcPauses,
        compilations: Compilations,
        background_saves: BackgroundSaves,
        accelerator: Accelerator,
        loader: LoaderSampler,
        sync_waits: SyncWaits,
        settings: ProcessSettings,
        script_collectives: ScriptCollectives,
        hooks: Callable[[], tuple[HookState, ...]] = tuple,
        coordinates: Callable[[], tuple[Coordinate, ...]] = tuple,
    ) -> None:
        self._replay = replay
        self._loop = replay.loop
        self._pauses = FitPauses(pauses)
        self._began_ns = 0
        self._compilations = compilations
        self._background_saves = background_saves
        self._accelerator = accelerator
        self._loader = loader
        self._sync_waits = sync_waits
        self._settings = settings
        self._script_collectives = script_collectives
        self._cpus = 0.0
        self._epoch_starts = EpochStarts()
        self._hooks = hooks
        self._coordinates = coordinates

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._loop.saving > 0

    def fill(self, totals: Totals, *, samples: bool = True) -> None:
        """Update the totals, after the drained steps were added. They may be a step ahead of those.

        Args:
            samples: Whether to have another draw sampled, and more events recorded on the device: their cost
                is per flush.
        """
        loop = self._loop
        totals.train.micro_batches = loop.micro_batches
        totals.train.skipped = loop.skipped
        totals.checkpoint = PhaseTotals(loop.saves, loop.save_ns, loop.save_squares)
        self._count_pauses(totals)
        self._compilations.follow()
        totals.compiled = PhaseTotals(self._compilations.calls, self._compilations.ns)
        totals.graph_limit = self._compilations.graph_limit
        totals.background_saves = PhaseTotals(self._background_saves.calls, self._background_saves.ns())
        totals.ready = loop.ready if loop.ready >= 0 else None
        totals.train.tokens, totals.warmup.tokens = loop.tokens, loop.warmup_tokens
        epochs = self._replay.epochs
        totals.epoch_starts = replace(self._epoch_starts.totals)
        totals.epoch = replace(epochs.epoch)
        totals.train_pass = replace(epochs.train)
        totals.validate_pass = replace(epochs.validate)
        overhead = self._replay.overhead
        totals.overhead, totals.degradation_level = overhead.ratio, overhead.degradation_level
        totals.cuda = self._accelerator.memory()
        totals.host_memory = read_host_memory() or totals.host_memory
        totals.flops_per_step, totals.peak_flops = self._accelerator.flops()
        totals.script_collectives = self._script_collectives.longest()
        totals.hooks = self._hooks()
        # Once the script has ended its process groups, nothing shows the place any more.
        totals.coordinates = self._coordinates() or totals.coordinates
        if self._accelerator.is_timed:
            self._sync_waits.start(self._replay.thread)
            totals.sync_waits = self._sync_waits.waits(totals.train, totals.validate)
            totals.device_lag = PhaseTotals(*self._accelerator.lag)
            totals.device_work = PhaseTotals(*self._accelerator.work)
        self.fill_loader(totals)
        if not samples:
            return
        self._loader.arm()
        for spent in self._accelerator.times():
            phase = totals.of(spent.kind).phases[spent.phase]
            phase.device_ns += spent.ns
            phase.device_calls += spent.calls

    def add_steps(self, drained: Sequence[StepBatch]) -> None:
        """Add the steps that were drained just now, ahead of :meth:`fill`."""
        begun = self._replay.epochs.begun
        count = len(begun)
        self._epoch_starts.add(drained, begun[:count], self._loader.workers)
        del begun[:count]

    def fill_loader(self, totals: Totals) -> None:
        """Bring what is known of the loader up to date, and what is sampled beside it."""
        train = totals.train
        totals.loader = self._loader.use(
            train.phases[DATA].calls / train.steps if train.steps else 0.0, train.steps
        )
        settings = self._settings
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
