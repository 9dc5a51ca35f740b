"""The session of this process with its node's daemon: greeting, commands and their results.

Each command is passed to the component that it concerns, on the stream's thread; the rest is answered here.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from torchperfd.captures.files import Handover
from torchperfd.captures.job_capture import CaptureFetcher, Download, JobCaptureOrders
from torchperfd.captures.manager import CaptureManager
from torchperfd.hooks.process_groups import dump_flight_recorder
from torchperfd.link import flight_recorder
from torchperfd.link.flusher import Flusher
from torchperfd.link.outbox import Outbox
from torchperfd.link.rendezvous import Rendezvous
from torchperfd.link.stack_reporter import StackReporter
from torchperfd.model.identity import Identity
from torchperfd.safety.logs import Faults, log
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2

_ANSWER_S: Final = 1.0


class DaemonSession:
    """Greets the daemon, handles its commands, and sends goodbye at the end.

    Args:
        identity: Run and rank of this process.
        flusher: Sends what is measured; begins anew with each daemon.
        stacks: Answers requests for stacks.
        captures: Takes orders for captures of this process.
        outbox: Where answers go.
        session: Returns the number of the session that goes on, 0 between sessions.
        peer: Returns the user whose daemon that is, as the kernel knows it, and the daemon's socket.
        download: Asks the daemon for a file of a capture.
        faults: Where failures of ours are counted.

    Attributes:
        metrics_url: Where the daemon serves its metrics; empty before it has welcomed us.
        fetcher: Finds the files of captures, wherever the daemon keeps them.
        job_captures: Captures of the whole job that the script has ordered.
        rendezvous: Exchanges the daemons' addresses between the job's ranks.
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
        """Where captures of this process go."""
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
        """Return the first message of a session."""
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
        """Handle a command of the daemon."""
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
        """Send the daemon the addresses of all daemons of the job."""
        from torchperfd.v1 import session_pb2

        daemons = session_pb2.JobDaemons(addresses=addresses)
        self._outbox.put(session_pb2.ClientMessage(job_daemons=daemons))

    def _tell_collectives(self, request_id: int) -> None:
        from torchperfd.link import wire

        groups: list[flight_recorder.GroupProgress] = []
        try:
            record = dump_flight_recorder()
            groups = flight_recorder.read(record) if record is not None else []
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
