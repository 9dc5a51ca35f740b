"""The client: what :func:`torchperfd.attach` returns."""

import atexit
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from torchperfd.captures.job_capture import JobCapture, chosen_ranks
from torchperfd.captures.manager import Capture, load_options
from torchperfd.errors import CaptureError
from torchperfd.events import codes
from torchperfd.hooks.instruments import Instruments
from torchperfd.model.identity import read_identity
from torchperfd.parts import Parts
from torchperfd.report.rank import RankReport, load_layouts
from torchperfd.safety.logs import log
from torchperfd.steps.totals import Totals
from torchperfd.steps.wrapped import Phase

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from torchperfd.loggers.outputs import Logger
    from torchperfd.model.card import VerdictCard
    from torchperfd.model.process import HookState
    from torchperfd.v1 import control_pb2
    from torchperfd_cli.bench.loader_bench import LoaderBench

T = TypeVar("T")

_EXIT_BUDGET_S: Final = 0.8


class Client:
    """What a script asks of torchperfd in one training process; made by :func:`attach`.

    Attributes:
        parts: What it is made of, for integrations, benchmarks and tests; may change with any version.
    """

    def __init__(
        self,
        *,
        run: str | None,
        job: str | None,
        inert: bool,
        max_overhead: float | None = None,
        flops: bool = False,
        peak_flops: float | None = None,
        on_oom: bool = False,
    ) -> None:
        instruments = Instruments(inert=inert, max_overhead=max_overhead, flops=flops, peak_flops=peak_flops)
        self.parts = Parts(read_identity(run=run, job_name=job), instruments)
        self._instruments, self._flusher = instruments, self.parts.flusher
        self._buffer, self._names = instruments.buffer, instruments.names
        self._pid = os.getpid()
        self.attached = not inert
        self._is_detached = inert
        self._is_detaching = False
        if not inert:
            if on_oom:
                self.parts.out_of_memory.want()
            try:
                self.parts.start()
                atexit.register(self.detach)
            except BaseException:
                self.detach_by(time.monotonic())
                raise

    def __repr__(self) -> str:
        state = "detached" if self._is_detached else "with a daemon" if self.connected else "without a daemon"
        return f"<torchperfd client of run {self.run}, rank {self.rank}, {state}>"

    # What a script may call.

    @property
    def run(self) -> str:
        """The run's name."""
        return self.parts.identity.run

    @property
    def rank(self) -> int:
        """This process's rank in the run."""
        return self.parts.identity.rank

    @property
    def hooks(self) -> "tuple[HookState, ...]":
        """Which hooks are on, and why one is not; empty until torch has been imported."""
        return self._instruments.hook_states()

    @property
    def connected(self) -> bool:
        """Whether a daemon listens right now."""
        return self.parts.stream.connected

    def phase(self, name: str) -> "Phase":
        """Return a context manager that times a phase of your own.

        At most 16 names are kept; further ones are counted as ``other``.

        Raises:
            ValueError: The name is empty, longer than 64 characters, or unprintable.
        """
        return Phase(self._buffer, self._names.slot(name))

    @property
    def advice(self) -> str:
        """What to do where training was seen but no step of it, in one line; empty where steps were seen."""
        return self._instruments.advice if self.attached else ""

    def step(self, samples: int = 0, tokens: int = 0) -> None:
        """Say that a training step ends here. Once called, only these calls end steps."""
        self.count_tokens(tokens)
        self._buffer.mark(codes.STEP, samples)

    def count_tokens(self, tokens: int) -> None:
        """Say how many tokens the step in progress trains on; may be called any number of times."""
        if tokens:
            self._buffer.mark(codes.TOKENS, tokens)

    def wrap(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate over something that is not a DataLoader, timing each ``next()`` as ``data``.

        It may draw from a DataLoader itself: the batches that come out here are the ones that count.
        """
        return self._instruments.wrap(iterable)

    def report(self) -> RankReport:
        """Return the totals so far; ``print(client.report())`` shows the phase table."""
        if self.attached:
            self._flusher.refresh()
        return self.last_report()

    def verdict(self, timeout: float = 2.0) -> "VerdictCard":
        """Return why the run is slow, as the node's daemon sees it now; in a notebook, it shows itself.

        ``print(client.verdict())`` shows each cause with its cost, the evidence and a fix.

        Args:
            timeout: Seconds to wait for the daemon.
        """
        load_layouts()
        from torchperfd.model.card import VerdictCard

        found = self.parts.verdict(timeout) if self.attached else None
        if found is None:
            from torchperfd.report.overview import phase_shares

            remark = "no daemon has answered"
            if largest := next(iter(phase_shares(self.report(), {})), None):
                remark += f"; {largest.name} takes {largest.share:.0%} of the step"
            return VerdictCard(self.run, remark=remark, next_command="torchperfd serve")
        return found

    def add_logger(self, logger: "Logger") -> None:
        """Send the logger what is measured from here on, and the report at the end.

        It is called on a thread of its own; see :class:`torchperfd.loggers.Logger`.
        """
        if self.attached:
            self.parts.outputs.add(logger, self._leave_first)
            self._leave_first()

    @overload
    def capture(
        self,
        steps: int = 5,
        *,
        ranks: None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        kind: str = "trace",
    ) -> "Capture": ...

    @overload
    def capture(
        self,
        steps: int = 5,
        *,
        ranks: Literal["all"] | Sequence[int],
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        kind: str = "trace",
    ) -> JobCapture: ...

    def capture(
        self,
        steps: int = 5,
        *,
        ranks: Literal["all"] | Sequence[int] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        kind: str = "trace",
    ) -> "Capture | JobCapture":
        """Profile the next ``steps`` training steps of this rank; training goes on meanwhile.

        With ``ranks``, on rank 0, the same steps of these ranks, by way of the node's daemon.

        Args:
            steps: How many.
            ranks: Which ranks, or ``"all"`` of the job; this one by default.
            record_shapes: Record the shapes of operator inputs.
            with_stack: Record Python stacks.
            profile_memory: Record allocations.
            with_flops: Record what FLOPs are counted from.
            with_modules: Record which module runs, and with it Python stacks.
            kind: ``trace``, or ``memory`` for a snapshot of CUDA memory with its history.

        Raises:
            ValueError: ``steps`` is not 1 to 1000, or there are no such ranks or kind.
            CaptureError: Another capture is in progress, the client is detached, or ``ranks`` are
                asked for elsewhere than on rank 0 or without a daemon.
        """
        options = load_options()(
            steps, record_shapes, with_stack, profile_memory, kind, with_flops, with_modules
        )
        if not self.attached:
            raise CaptureError("the client is detached; call torchperfd.attach() first")
        if ranks is not None:
            return self.parts.daemon_session.job_captures.order(self.rank, chosen_ranks(ranks), options)
        return Capture(self.parts.captures.start(options))

    def bench(
        self,
        loader: "DataLoader[Any]",
        step: "Callable[[Any], Any] | None" = None,
        *,
        seconds: float = 1.0,
        max_workers: int | None = None,
        batch_sizes: Sequence[int] = (),
    ) -> "LoaderBench":
        """Measure a DataLoader under other settings, here and now; ``print()`` shows the table.

        No training step is counted meanwhile. ``torchperfd bench dataloader`` does the same in a process of
        its own, which can be ended when the loader deadlocks.

        Args:
            loader: Is not changed.
            step: The rest of a training step, called with each batch, for real. Without it the loader is
                measured by itself, and compared with the rest of the steps so far.
            seconds: To measure each setting for.
            max_workers: The most workers to try; by default twice the CPUs, at most 16.
            batch_sizes: To try; the loader's own by default.

        Raises:
            TorchperfdError: No setting gave a batch.
        """
        from torchperfd_cli.bench.in_process import bench_here

        train = self.report().to_dict()["train"]
        waits = train["phases"].get("data", {}).get("seconds_total", 0.0)
        rest = (train["step_seconds_total"] - waits) / train["steps"] if train["steps"] else None
        return bench_here(
            loader,
            step=step,
            rest_seconds=rest,
            seconds=seconds,
            max_workers=max_workers,
            batch_sizes=batch_sizes,
        )

    def detach(self) -> None:
        """Put torch back as it was, send what is left, and end every thread.

        Takes up to a second. If the trace of a capture is being written, waits for it as well, up to 60 s.
        """
        self.detach_by(time.monotonic() + _EXIT_BUDGET_S)

    def detach_by(self, deadline: float) -> None:
        """Detach, waiting for the daemon no longer than until ``deadline`` on the monotonic clock."""
        if self._is_detached or self._is_detaching or os.getpid() != self._pid:
            return
        self._is_detaching = True
        try:
            self._detach(deadline)
            self._is_detached = True
        finally:
            # If a signal handler of the script has raised, a second call does the rest.
            self._is_detaching = False

    def _detach(self, deadline: float) -> None:
        self.finish()
        self.attached = False
        atexit.unregister(self.detach)
        self.parts.stop(deadline)

    def finish(self) -> None:
        """End the loop: finish its last step, remove the hooks, stay connected."""
        if not self.attached:
            return
        self._instruments.uninstall()
        self._flusher.refresh()
        self._instruments.replay.finish()
        self.parts.captures.loop_ended()
        self.send_unfinished()
        self.parts.has_ended = True
        self.parts.conclude(self.report)

    # What `torchperfd run` asks besides.

    def send_unfinished(self) -> None:
        """Send what was measured, from another thread, and leave the hooks: the process is about to die."""
        from torchperfd.v1 import session_pb2

        self._flusher.reports_blocks = True
        self._flusher.refresh(send=True)
        self._flusher.announce(session_pb2.RUN_STATE_FINISHED)

    def last_report(self) -> RankReport:
        """Return the totals as they were last flushed; waits for nothing."""
        dropped = self._instruments.replay.recorder.dropped
        return RankReport(self.parts.identity.rank, self._flusher.snapshot(), self._names, dropped)

    def send_rest(self, deadline: float) -> None:
        """Send what waits for the daemon, until ``deadline`` on the monotonic clock, and end the session."""
        self.parts.leave_daemon(deadline)

    def order_automatic_capture(self, steps: int, rank: int) -> JobCapture:
        """Have the daemon capture steps of a rank for the run itself; captures of its user wait for its end.

        Raises:
            CaptureError: This is not rank 0, or no daemon takes orders.
        """
        options = load_options()(steps, automatic=True)
        return self.parts.daemon_session.job_captures.order(self.rank, [rank], options)

    def whole_run(self, timeout: float, end_seconds: float = 0.0) -> "control_pb2.GetRunResponse | None":
        """Return what the daemon knows of all ranks of the run, None when it does not answer.

        Args:
            timeout: Seconds to wait for the daemon.
            end_seconds: If the run ends, for how much of that time the daemon asks other nodes for the
                verdict.
        """
        return self.parts.stream.get_run(self.parts.identity.run, timeout, end_seconds)

    # What attach() and integrations ask besides.

    def take_options(
        self,
        run: str | None,
        job: str | None,
        max_overhead: float | None,
        *,
        flops: bool,
        peak_flops: float | None,
        on_oom: bool,
    ) -> None:
        """Take over what a later :func:`attach` asks for, as the script's own under ``torchperfd run``."""
        if max_overhead is not None:
            self._instruments.replay.overhead.limit = max_overhead
        if flops or peak_flops is not None:
            self._instruments.accelerator.count_flops(peak_flops)
        if on_oom:
            self.parts.out_of_memory.want()
        for option, asked, ours in (
            ("run", run, self.parts.identity.run),
            ("job", job, self.parts.identity.job_name),
        ):
            if asked is not None and asked != ours:
                log.info("attach(%s=%r) comes too late: this process is attached as %r", option, asked, ours)

    def watch_model(self, model: "nn.Module") -> None:
        """Time the forward of a model that the caller names, instead of searching for it."""
        self._instruments.hooks.add_model(model)

    def export_metrics(self, port: int) -> None:
        """Serve this rank's own Prometheus page on a loopback port."""

        def totals() -> Totals:
            self._flusher.flush()
            return self._flusher.totals

        if self.attached:
            self.parts.outputs.serve(port, totals)

    def become_inert(self) -> None:
        """After a fork, in the child: do nothing ever again."""
        self.attached = False
        self.parts.abandon_in_child()

    def _leave_first(self) -> None:
        """Detach before what has registered so far: a tracker ends its run at exit, too."""
        if self.attached:
            atexit.unregister(self.detach)
            atexit.register(self.detach)
