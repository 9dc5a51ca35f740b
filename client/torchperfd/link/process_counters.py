"""Tallies: what is counted beside the steps, and belongs into the account all the same."""

from collections.abc import Callable
from dataclasses import replace

from torchperfd.device.accelerator import Accelerator
from torchperfd.hook_state import HookState
from torchperfd.hooks.compilations import Compilations
from torchperfd.hooks.fit_pauses import FitPauses
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.pauses import GcPauses
from torchperfd.steps.recorder import DATA
from torchperfd.steps.replay import Replay
from torchperfd.steps.totals import Account, GcTotals, PhaseTotals


class ProcessCounters:
    """Reads the counters of the loop, the garbage collector, the compiler and the device; no lock.

    Args:
        replay: Whose loop, passes and overhead to read.
        pauses: The garbage collector's.
        compilations: The compiler's.
        accelerator: What is told of the device.
        loader: Samples how the loader is used.
        hooks: Returns which hooks are on.
    """

    def __init__(
        self,
        replay: Replay,
        pauses: GcPauses,
        compilations: Compilations,
        accelerator: Accelerator,
        loader: LoaderSampler,
        hooks: Callable[[], tuple[HookState, ...]] = tuple,
    ) -> None:
        self._replay = replay
        self._loop = replay.loop
        self._pauses = FitPauses(pauses)
        self._began_ns = 0
        self._compilations = compilations
        self._accelerator = accelerator
        self._loader = loader
        self._hooks = hooks

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._loop.saving > 0

    def fill(self, account: Account) -> None:
        """Bring the account up to date, once the drained steps are in it. It may be a step ahead of them."""
        loop = self._loop
        account.train.micro_batches = loop.micro_batches
        account.train.skipped = loop.skipped
        account.checkpoint = PhaseTotals(loop.saves, loop.save_ns, loop.save_squares)
        self._count_pauses(account)
        self._compilations.follow()
        account.compiled = PhaseTotals(self._compilations.calls, self._compilations.ns)
        account.ready = loop.ready if loop.ready >= 0 else None
        account.train.tokens, account.warmup.tokens = loop.tokens, loop.warmup_tokens
        passes = self._replay.passes
        account.epoch = replace(passes.epoch)
        account.train_pass = replace(passes.train)
        account.validate_pass = replace(passes.validate)
        overhead = self._replay.overhead
        account.overhead, account.shed = overhead.ratio, overhead.degradation_level
        account.cuda = self._accelerator.memory()
        account.flops_per_step, account.peak_flops = self._accelerator.flops()
        account.hooks = self._hooks()
        self.fill_loader(account)
        self._loader.arm()
        for spent in self._accelerator.times():
            phase = account.of(spent.kind).phases[spent.phase]
            phase.device_ns += spent.ns
            phase.device_calls += spent.calls

    def fill_loader(self, account: Account) -> None:
        """Bring what is known of the loader up to date."""
        train = account.train
        account.loader = self._loader.use(train.phases[DATA].calls / train.steps if train.steps else 0.0)

    def _count_pauses(self, account: Account) -> None:
        # Steps have Unix times, collections those of the monotonic clock. The wall clock may be set during
        # training: the start is converted once, while the offset is that of the first step.
        offset = self._replay.recorder.wall_offset
        if account.began_ns and not self._began_ns:
            self._began_ns = account.began_ns - offset
        self._pauses.settle(self._began_ns, account.ended_ns - offset)
        account.gc = tuple(
            GcTotals(calls, ns) for calls, ns in zip(self._pauses.calls, self._pauses.ns, strict=True)
        )
