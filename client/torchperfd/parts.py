"""The parts of one client, put together, and their session with the node's daemon.

The composition root of the training process.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from torchperfd.captures.files import Handover
from torchperfd.captures.job_capture import CaptureFetcher, Download, JobCaptureOrders
from torchperfd.captures.manager import CaptureManager, CaptureTarget
from torchperfd.captures.out_of_memory import OutOfMemory
from torchperfd.hooks import process_groups
from torchperfd.hooks.instruments import Instruments
from torchperfd.hooks.process_groups import Rendezvous, dump_flight_recorder
from torchperfd.link.flusher import Flusher
from torchperfd.link.outbox import Outbox
from torchperfd.link.stack_reporter import StackReporter
from torchperfd.link.stream import Stream
from torchperfd.model.identity import Identity
from torchperfd.model.process import GroupProgress
from torchperfd.safety.descriptors import DescriptorGuard
from torchperfd.safety.logs import Faults, log
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.loggers.outputs import Outputs
    from torchperfd.model.card import VerdictCard
    from torchperfd.report.rank import RankReport
    from torchperfd.v1 import session_pb2


_ANSWER_S: Final = 1.0


class DaemonSession:
    """Greets the daemon, handles its commands, and sends goodbye at the end.

    Args:
        session: Returns the number of the session that goes on, 0 between sessions.
        peer: Returns the user whose daemon that is, as the kernel knows it, and the daemon's socket.
        download: Asks the daemon for a file of a capture.

    Attributes:
        metrics_url: Where the daemon serves its metrics; empty before it has welcomed us.
    """

    def __init__(
        self,
        identity: Identity,
        flusher: Flusher,
        stacks: StackReporter,
        captures: CaptureManager,
        outbox: "Outbox[session_pb2.ClientMessage]",
        session: Callable[[], int],
        peer: Callable[[], tuple[int, str]],
        download: Download,
        faults: Faults,
    ) -> None:
        self.identity = identity
        self._flusher = flusher
        self._stacks = stacks
        self._captures = captures
        self._outbox = outbox
        self._peer = peer
        self._faults = faults
        self.metrics_url = ""
        self._has_page = False
        self._on_page: list[Callable[[str], None]] = []
        self._run_there = ""
        self.fetcher = CaptureFetcher(captures.directory, download)
        self.job_captures = JobCaptureOrders(outbox, session, self.fetcher.fetch)
        self.rendezvous = Rendezvous(self.send_peers)

    @property
    def captures_dir(self) -> str:
        return str(self._captures.directory.path)

    def read_capture(self, capture_id: str, name: str, most_bytes: int) -> bytes:
        """Return a small file of a capture; empty if there is none, or if it has more than ``most_bytes``."""
        path = self._captures.directory.path / capture_id / name
        with contextlib.suppress(OSError):
            if path.stat().st_size <= most_bytes:
                return path.read_bytes()
        return self.fetcher.read(capture_id, name, most_bytes, _ANSWER_S)

    def when_page_is_known(self, on_page: Callable[[str], None]) -> None:
        """Have a function called once with :attr:`metrics_url`, when a daemon with a live page is there.

        It is called at once, or on the stream's thread.
        """
        self._on_page.append(on_page)
        self._announce_page()

    def _announce_page(self) -> None:
        while self._has_page and self.metrics_url and self._on_page:
            try:
                # Of two threads only one gets it.
                self._on_page.pop()(self.metrics_url)
            except Exception as error:  # noqa: BLE001 - the session goes on without it
                self._faults.note("live page", error)

    def hello(self) -> "session_pb2.ClientMessage":
        from torchperfd.link import wire

        return wire.hello(self.identity, _torch_version())

    def on_welcome(self, welcome: "session_pb2.Welcome") -> None:
        """Take over the settings of a daemon that has accepted the session."""
        uid, path = self._peer()
        handover = Handover(path, uid, welcome.handover_token) if welcome.handover_token else None
        warning = self._captures.directory.on_welcome(welcome.captures_dir, handover, uid)
        if warning:
            log.warning("%s; captures of this process go to %s", warning, self.captures_dir)
        self.metrics_url = welcome.metrics_url
        self._has_page = contract.PAGE in welcome.features
        self._announce_page()
        if welcome.run not in ("", self.identity.run, self._run_there):
            self._run_there = welcome.run
            log.warning(
                "this node has a rank %d of run %s already: the daemon names the run of this process %s",
                self.identity.rank,
                self.identity.run,
                welcome.run,
            )
        if welcome.fleet_address and self.identity.local_rank == 0:
            self.rendezvous.discover_peers(welcome.fleet_address)
        self.job_captures.on_welcome(welcome.features)
        # What an earlier daemon has asked for does not concern this one.
        self._flusher.report_frequently(0)
        self._flusher.greet()

    def handle_command(self, message: "session_pb2.DaemonMessage") -> None:
        if message.HasField("dump_stacks"):
            if not (message.dump_stacks.loading_only or message.dump_stacks.threads_only):
                self._flusher.flush()  # so that the newest phase is known
            self._stacks.report(message.dump_stacks)
        elif message.HasField("tell_collectives"):
            self._tell_collectives(message.tell_collectives.request_id)
        elif message.HasField("report_frequently"):
            self._flusher.report_frequently(message.report_frequently.seconds)
        elif message.HasField("capture_order_result"):
            self.job_captures.on_result(message.capture_order_result)
        else:
            self._captures.handle_command(message)

    def close(self) -> None:
        """Send the goodbye message: the process leaves on purpose."""
        from torchperfd.v1 import session_pb2

        # Keyed like the other topics: put() would send it before the last totals.
        self._outbox.put_newest(
            "goodbye", session_pb2.ClientMessage(goodbye=session_pb2.Goodbye(reason="exit"))
        )

    def send_peers(self, addresses: Sequence[str]) -> None:
        from torchperfd.v1 import session_pb2

        daemons = session_pb2.JobDaemons(addresses=addresses)
        self._outbox.put(session_pb2.ClientMessage(job_daemons=daemons))

    def _tell_collectives(self, request_id: int) -> None:
        from torchperfd.link import wire

        groups: list[GroupProgress] = []
        try:
            record = dump_flight_recorder()
            groups = process_groups.read(record) if record is not None else []
        except Exception as error:  # noqa: BLE001 - the stacks are sent without it
            self._faults.note("flight recorder", error)
        self._outbox.put(wire.collective_report(request_id, groups))


def _torch_version() -> str:
    """Return the version of the torch that is installed, which may not be imported yet."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


_OUTBOX_STEPS: Final = 40_000
_LOGGED_VERDICT_S: Final = 0.2
"""How long a logger waits for a verdict; at the exit this is part of the one second."""
END_VERDICT_S: Final = 0.35
"""At the end of a run, for how long the node's daemon asks those of other nodes for the verdict."""


class Parts:
    """Puts the parts of one client together, starts and stops them."""

    def __init__(self, identity: Identity, instruments: Instruments) -> None:
        self.identity = identity
        self.instruments = instruments
        self.has_ended = False
        replay, faults = instruments.replay, instruments.faults
        self.outbox: Outbox[session_pb2.ClientMessage] = Outbox(_OUTBOX_STEPS)
        target = CaptureTarget(
            replay,
            identity,
            lambda: self.flusher.step_seconds(),
            instruments.names.name,
            lambda: self.flusher.unrecorded(),
        )
        self.captures = CaptureManager(target, self.outbox)
        self.stacks = StackReporter(instruments, self.outbox)
        self.flusher = Flusher(instruments, self.outbox)
        instruments.buffer.on_low = self.flusher.wake
        self.daemon_session = DaemonSession(
            identity,
            self.flusher,
            self.stacks,
            self.captures,
            self.outbox,
            lambda: self.stream.session,
            lambda: (self.stream.peer_uid, self.stream.socket),
            lambda *asked: self.stream.download(*asked),
            faults,
        )
        self._guard = DescriptorGuard(self._give_up_descriptors)
        self.stream = Stream(
            sockets=contract.socket_candidates(),
            hello=self.daemon_session.hello,
            outbox=self.outbox,
            on_welcome=self.daemon_session.on_welcome,
            on_command=self.daemon_session.handle_command,
            faults=faults,
            guard=self._guard,
        )
        self.out_of_memory = OutOfMemory(
            self.captures.directory,
            identity,
            lambda: replay.loop.train_steps,
            lambda seconds: self.stream.get_run(identity.run, seconds),
            faults,
        )
        self._outputs: Outputs | None = None

    @property
    def outputs(self) -> "Outputs":
        """The loggers, and the process's own metrics page; loaded by the first of them."""
        if self._outputs is None:
            from torchperfd.loggers.outputs import Outputs, Readings

            readings = Readings(
                self.instruments.names,
                self.instruments.faults,
                self.flusher.snapshot,
                lambda: self.flusher.totals.train.steps,
                lambda: self.verdict(_LOGGED_VERDICT_S),
            )
            self._outputs = Outputs(self.identity, readings)
        return self._outputs

    def conclude(self, report: "Callable[[], RankReport]") -> None:
        """Ask every logger for its last numbers, the table and the end; returns at once."""
        if self._outputs is not None:
            self._outputs.conclude(report)

    def verdict(self, timeout: float) -> "VerdictCard | None":
        """Return the card of the daemon's verdict on the run; None if it has none, or does not answer."""
        from torchperfd.model.card import card_of

        end_seconds = END_VERDICT_S if self.has_ended else 0.0
        answer = self.stream.get_run(self.identity.run, timeout + end_seconds, end_seconds)
        return card_of(answer.verdict) if answer is not None and answer.HasField("verdict") else None

    def start(self) -> None:
        """Start all threads, and touch torch once it has been imported."""
        self.flusher.start()
        self._guard.install()
        self.stream.start()
        self.stacks.register_signal(self.stream.native_id)
        self._guard.guard(self.stacks.descriptors)
        self.instruments.install(self._torch_is_imported, untraced=Flusher)

    def stop(self, deadline: float) -> None:
        """End all threads, waiting for the daemon until ``deadline`` on the monotonic clock at most."""
        if self._outputs is not None:
            self._outputs.close()
        self.out_of_memory.end()
        self.flusher.stop(0.1)
        self.leave_daemon(deadline)
        self._guard.uninstall()
        self.stacks.unregister_signal()
        if self._outputs is not None:
            self._outputs.join(deadline)

    def leave_daemon(self, deadline: float) -> None:
        """End the session after what waits for the daemon was sent, or at ``deadline``."""
        if self.stream.connected:
            self.daemon_session.close()
        self.daemon_session.rendezvous.stop(0.1)
        self.stream.stop(max(0.1, deadline - time.monotonic()))

    def abandon_in_child(self) -> None:
        """Do nothing ever again: the caller is a forked child, which has none of the threads."""
        self.instruments.buffer.thread = 0
        self.flusher.abandon_in_child()
        self.instruments.accelerator.end("forked")
        self.stacks.unregister_signal()
        self.stream.abandon_in_child()

    def _torch_is_imported(self) -> None:
        self.captures.torch_ready.set()
        self.out_of_memory.torch_is_imported()

    def _give_up_descriptors(self) -> None:
        """The script is about to close them: gRPC would end the process, and faulthandler write elsewhere."""
        self.stacks.unregister_signal()
        self.stream.drop()
