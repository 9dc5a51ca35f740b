"""The client: what :func:`attach` returns, and the composition root of the training process."""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeVar, overload

from torchperfd.captures.capture import CaptureOptions
from torchperfd.captures.handle import Capture
from torchperfd.captures.job_capture import JobCapture
from torchperfd.captures.manager import CaptureManager
from torchperfd.daemon_session import DaemonSession
from torchperfd.device.accelerator import Accelerator
from torchperfd.errors import CaptureError
from torchperfd.events import OUTDATED, EventBuffer, codes
from torchperfd.faults import Faults
from torchperfd.hooks.compilations import Compilations
from torchperfd.hooks.loader_use import LoaderSampler
from torchperfd.hooks.pauses import GcPauses
from torchperfd.hooks.torch_import import ModuleImport, when_torch_is_imported
from torchperfd.identity import read_identity
from torchperfd.link.flusher import Flusher
from torchperfd.link.outbox import Outbox
from torchperfd.link.process_counters import ProcessCounters
from torchperfd.link.stream import Stream
from torchperfd.report import RankReport
from torchperfd.safety.descriptors import DescriptorGuard
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log
from torchperfd.stacks import StackReporter
from torchperfd.steps.iterators import Iterators
from torchperfd.steps.overhead import Overhead
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.replay import Replay
from torchperfd.steps.totals import Totals
from torchperfd.steps.wrapped import WrappedIterator
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torch import nn

    from torchperfd.hook_state import HookState
    from torchperfd.hooks import Hooks
    from torchperfd.loggers.exporter import Exporter
    from torchperfd.loggers.protocol import Logger
    from torchperfd.loggers.sender import Sender
    from torchperfd.v1 import control_pb2, session_pb2


T = TypeVar("T")

_BUFFER_EVENTS: Final = 131_072
_RING_STEPS: Final = 4096
_OUTBOX_STEPS: Final = 40_000
_EXIT_BUDGET_S: Final = 0.8

_current: "Client | None" = None
_attaching_thread = 0
_forks_watched = False


def attach(
    model: "nn.Module | None" = None,
    *,
    job: str | None = None,
    run: str | None = None,
    metrics_port: int | None = None,
    loggers: "Iterable[Logger]" = (),
    max_overhead: float | None = None,
    flops: bool = False,
    peak_flops: float | None = None,
) -> "Client":
    """Instrument this process and connect to the node's daemon, now or whenever there is one.

    Call it on the thread that trains. A second call returns the same client. It raises nothing of its own,
    only what a signal handler of the script raises meanwhile: where something is missing, the log says what,
    and the client does less.

    Args:
        model: The model whose forward to time; found by itself when left out.
        job: What people call this kind of run; the script's name by default.
        run: The run's name; the launcher's by default.
        metrics_port: Serve this rank's own Prometheus page on this loopback port.
        loggers: Where to send what is measured, besides the daemon; see :mod:`torchperfd.loggers`.
        max_overhead: The part of training time, 0 to 1, that this may cost. Where it costs more by its
            own estimate, it gives up detail, level by level, and logs that. Unlimited by default.
        flops: Count the operations of one training step, and report FLOP/s and MFU.
        peak_flops: Operations per second that the device can do; looked up when left out.
    """
    global _current, _attaching_thread
    if _attaching_thread == threading.get_ident():
        # A signal handler of the script has interrupted an attach on this very thread.
        return _current or Client(run=run, job=job, inert=True)
    _attaching_thread = threading.get_ident()
    try:
        if _current is None or not _current.attached:
            _current = Client(
                run=run,
                job=job,
                inert=_is_helper_process(),
                max_overhead=max_overhead,
                flops=flops,
                peak_flops=peak_flops,
            )
        else:
            _current._take_options(run, job, max_overhead, flops=flops, peak_flops=peak_flops)
        if model is not None:
            _current._watch_model(model)
        if metrics_port is not None:
            _current._export_metrics(metrics_port)
        for logger in loggers:
            _current.add_logger(logger)
    except Exception as error:  # the promise above outranks whatever went wrong
        if is_from_script(error):
            raise
        log.exception("torchperfd cannot attach; training goes on without it")
        _current = Client(run=run, job=job, inert=True)
    finally:
        _attaching_thread = 0
    return _current


def _chosen(ranks: Literal["all"] | Sequence[int]) -> list[int]:
    """Return the ranks that are asked for; none for all.

    Raises:
        ValueError: There are no such ranks.
    """
    if ranks == "all":
        return []
    if isinstance(ranks, str) or not ranks or not all(0 <= rank < 2**32 for rank in ranks):
        raise ValueError(f'ranks must be "all" or ranks of the job, not {ranks!r}')
    return sorted(set(ranks))


def _watch_forks() -> None:
    """Make the client of a forked child inert; registered once, since it cannot be taken back."""
    global _forks_watched
    if not _forks_watched:
        _forks_watched = True
        os.register_at_fork(after_in_child=lambda: _current._become_inert() if _current else None)


def _is_helper_process() -> bool:
    """Return whether this process only serves a training process: a DataLoader worker.

    A spawned process that imports the script's main module, which may call ``attach()`` at its
    top, does not say yet what it will be; if it trains, it can attach where it does.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


class Client:
    """Everything torchperfd does in one training process; made by :func:`attach`."""

    def __init__(
        self,
        *,
        run: str | None,
        job: str | None,
        inert: bool,
        max_overhead: float | None = None,
        flops: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        self._identity = read_identity(run=run, job_name=job)
        self._faults = Faults()
        self._names = PhaseNames()
        self._buffer = EventBuffer(16 if inert else _BUFFER_EVENTS, codes.CUDA_EVENT)
        if inert:
            self._buffer.thread = 0
        self._iterators = Iterators(self._buffer)
        overhead = Overhead(self._buffer, max_overhead)
        self._replay = Replay(self._buffer, 16 if inert else _RING_STEPS, self._faults, overhead)
        self._loop = self._replay.loop
        self._recorder = self._replay.recorder
        self._outbox: Outbox[session_pb2.ClientMessage] = Outbox(_OUTBOX_STEPS)
        self._captures = CaptureManager(
            self._replay,
            self._identity,
            self._outbox,
            self._step_seconds,
            self._names.name,
            lambda: self._flusher.unrecorded(),
        )
        self._stacks = StackReporter(self._buffer, self._replay, self._names, self._outbox, self._faults)
        self._pauses = GcPauses()
        self._compilations = Compilations()
        self._loader = LoaderSampler()
        self._accelerator = Accelerator(self._replay, self._faults, count_flops=flops, peak_flops=peak_flops)
        counters = ProcessCounters(
            *(self._replay, self._pauses, self._compilations, self._accelerator, self._loader),
            hooks=lambda: self.hooks,
        )
        self._flusher = Flusher(self._replay, self._names, self._outbox, self._faults, counters)
        self._buffer.on_low = self._flusher.wake
        self._daemon_session = DaemonSession(
            self._identity,
            self._flusher,
            self._stacks,
            self._captures,
            self._outbox,
            lambda: self._stream.session,
            lambda: self._stream.peer_uid,
            self._faults,
        )
        self._guard = DescriptorGuard(self._give_up_descriptors)
        self._stream = Stream(
            sockets=contract.socket_candidates(),
            hello=self._daemon_session.hello,
            outbox=self._outbox,
            on_welcome=self._daemon_session.on_welcome,
            on_command=self._daemon_session.handle_command,
            faults=self._faults,
            guard=self._guard,
        )
        self._exporter: Exporter | None = None
        self._senders: list[Sender] = []
        self._hooks: Hooks | None = None
        self._model: nn.Module | None = None
        self._pending_torch: ModuleImport | None = None
        self._pid = os.getpid()
        self.attached = not inert
        self._is_detached = inert
        self._is_detaching = False
        if not inert:
            try:
                self._begin()
            except BaseException:
                self.detach_by(time.monotonic())
                raise

    def _begin(self) -> None:
        if OUTDATED:
            log.warning(
                "hooks run in Python, at ten times the cost: %s; reinstall it with `pip install "
                "--force-reinstall --no-deps torchperfd`, a checkout with `pip install -e .`",
                OUTDATED,
            )
        self._flusher.start()
        self._pauses.install()
        self._guard.install()
        self._stream.start()
        self._stacks.register_signal(self._stream.native_id)
        self._guard.guard(self._stacks.descriptors)
        self._pending_torch = when_torch_is_imported(self._install_hooks)
        _watch_forks()
        atexit.register(self.detach)

    # What a script may call.

    @property
    def run(self) -> str:
        """The run's name."""
        return self._identity.run

    @property
    def rank(self) -> int:
        """This process's rank in the run."""
        return self._identity.rank

    @property
    def hooks(self) -> "tuple[HookState, ...]":
        """Which hooks are on, and why one is not; empty until torch has been imported."""
        if self._hooks is None:
            return ()
        flops = self._accelerator.flops_state
        return self._hooks.states if flops is None else (*self._hooks.states, flops)

    @property
    def connected(self) -> bool:
        """Whether a daemon listens right now."""
        return self._stream.connected

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
        if not self.attached or self._loop.train_steps:
            return ""
        backwards = self._loop.backward_calls
        if backwards:
            return (
                f"{backwards} backward passes were seen, but no optimizer of torch's that stepped: call "
                "client.step() once per training step, or use the framework's integration"
            )
        if self._loop.validate_steps or "torch" not in sys.modules:
            return ""
        return (
            "no backward pass was seen in this process: if it starts processes that train, call "
            "torchperfd.attach() in the function that they run, or start them with torchrun"
        )

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
        return WrappedIterator(iterable, self._buffer, self._iterator_begins, self._samples_in)

    def report(self) -> RankReport:
        """Return the totals so far; ``print(client.report())`` shows the phase table."""
        if self.attached:
            self._flusher.refresh()
        dropped = self._recorder.dropped
        return RankReport(self._identity.rank, self._flusher.snapshot(), self._names, dropped)

    def add_logger(self, logger: "Logger") -> None:
        """Send the logger what is measured from here on, and the report at the end.

        It is called on a thread of its own; see :class:`torchperfd.loggers.Logger`.
        """
        if not self.attached:
            return
        from torchperfd.loggers.sender import Sender

        name = f"logger {type(logger).__name__}"
        taken = {sender.place for sender in self._senders}
        sender = Sender(
            logger,
            name if name not in taken else f"{name} {len(taken) + 1}",
            totals=self._flusher.snapshot,
            steps=lambda: self._flusher.totals.train.steps,
            names=self._names,
            faults=self._faults,
            on_first=self._leave_first,
        )
        self._senders.append(sender)
        sender.start()
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
    ) -> "JobCapture": ...

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
        options = CaptureOptions(
            steps, record_shapes, with_stack, profile_memory, kind, with_flops, with_modules
        )
        if not self.attached:
            raise CaptureError("the client is detached; call torchperfd.attach() first")
        if ranks is not None:
            return self._daemon_session.job_captures.order(self.rank, _chosen(ranks), options)
        return Capture(self._captures.start(options))

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
        exporter, self._exporter = self._exporter, None
        closing = exporter.close() if exporter is not None else None
        self._flusher.stop(0.1)
        if self.connected:
            self._daemon_session.close()
        self._daemon_session.rendezvous.stop(0.1)
        self._stream.stop(max(0.1, deadline - time.monotonic()))
        self._guard.uninstall()
        self._stacks.unregister_signal()
        if closing is not None:
            closing.join(max(0.1, deadline - time.monotonic()))
        for sender in self._senders:
            sender.join(max(0.05, deadline - time.monotonic()))

    def finish(self) -> None:
        """End the loop: finish its last step, remove the hooks, stay connected."""
        if not self.attached:
            return
        if self._pending_torch is not None:
            self._pending_torch.cancel()
        if self._hooks is not None:
            self._hooks.uninstall()
        self._pauses.uninstall()
        self._compilations.uninstall()
        self._accelerator.end("training ended before a step was counted")
        self._buffer.thread = 0
        self._flusher.refresh()
        self._replay.finish()
        self._captures.loop_ended()
        from torchperfd.v1 import session_pb2

        self._flusher.refresh(send=True)
        self._flusher.announce(session_pb2.RUN_STATE_FINISHED)
        if self._senders:
            report = self.report()
            for sender in self._senders:
                sender.conclude(report)

    # What `torchperfd run` asks besides.

    @property
    def metrics_url(self) -> str:
        """Where the daemon serves its metrics; empty before it has welcomed us."""
        return self._daemon_session.metrics_url

    @property
    def captures_dir(self) -> str:
        """Where captures of this process go."""
        return self._daemon_session.captures_dir

    def whole_run(self, timeout: float) -> "control_pb2.GetRunResponse | None":
        """Return what the daemon knows of all ranks of the run, None when it does not answer."""
        return self._stream.get_run(self._identity.run, timeout)

    # Parts.

    def _samples_in(self, batch: object) -> int:
        from torchperfd.hooks.batches import samples_in

        try:
            return samples_in(batch)
        except Exception as error:
            if is_from_script(error):
                raise
            self._faults.note("wrap", error)
            return 0

    def _iterator_begins(self, iterator: object) -> None:
        try:
            self._iterators.begin(iterator)
        except Exception as error:
            if is_from_script(error):
                raise
            self._faults.note("wrap", error)

    def _install_hooks(self) -> None:
        try:
            from torchperfd.hooks import Hooks
            from torchperfd.hooks.frames import keep_classes_out_of_graphs

            keep_classes_out_of_graphs(Flusher)  # a full ring buffer is read from within a hook
            self._hooks = Hooks(
                *(self._buffer, self._replay, self._faults),
                *(self._loader, self._iterators, self._compilations),
            )
            self._hooks.install()
            if self._model is not None:
                self._hooks.add_model(self._model)
            self._accelerator.watch()
        except BaseException as error:  # runs inside the script's `import torch`
            if self._hooks is not None:
                self._hooks.uninstall()
            if is_from_script(error):
                self._hooks = None
                raise
            self._faults.note("hooks", error)
        self._captures.torch_ready.set()

    def _take_options(
        self,
        run: str | None,
        job: str | None,
        max_overhead: float | None,
        *,
        flops: bool,
        peak_flops: float | None,
    ) -> None:
        """Take over what a later :func:`attach` asks for, as the script's own under ``torchperfd run``."""
        if max_overhead is not None:
            self._replay.overhead.limit = max_overhead
        if flops or peak_flops is not None:
            self._accelerator.count_flops(peak_flops)
        for option, asked, ours in (
            ("run", run, self._identity.run),
            ("job", job, self._identity.job_name),
        ):
            if asked is not None and asked != ours:
                log.info("attach(%s=%r) comes too late: this process is attached as %r", option, asked, ours)

    def _watch_model(self, model: "nn.Module") -> None:
        self._model = model
        if self._hooks is not None:
            self._hooks.add_model(model)

    def _export_metrics(self, port: int) -> None:
        if self._exporter is not None or not self.attached:
            return
        from torchperfd.loggers.exporter import Exporter

        def totals() -> Totals:
            self._flusher.flush()
            return self._flusher.totals

        try:
            self._exporter = Exporter(
                port, run=self._identity.run, rank=self._identity.rank, names=self._names, totals=totals
            )
        except OSError as error:
            log.warning("cannot serve metrics on port %d: %s; choose another metrics_port", port, error)

    def _leave_first(self) -> None:
        """Detach before what has registered so far: a tracker ends its run at exit, too."""
        if self.attached:
            atexit.unregister(self.detach)
            atexit.register(self.detach)

    def _step_seconds(self) -> float:
        return self._flusher.step_seconds()

    def _give_up_descriptors(self) -> None:
        """The script is about to close them: gRPC would end the process, and faulthandler write elsewhere."""
        self._stacks.unregister_signal()
        self._stream.drop()

    def _become_inert(self) -> None:
        """After a fork, in the child: do nothing ever again."""
        self.attached = False
        self._buffer.thread = 0
        self._flusher.abandon_in_child()
        self._accelerator.end("forked")
        self._stacks.unregister_signal()
        self._stream.abandon_in_child()


class Phase:
    """A user phase; may be entered any number of times."""

    __slots__ = ("_buffer", "_slot")

    def __init__(self, buffer: EventBuffer, slot: int) -> None:
        self._buffer = buffer
        self._slot = slot

    def __enter__(self) -> "Phase":
        self._buffer.mark(codes.ENTER, self._slot)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._buffer.mark(codes.EXIT)
