"""The stream: one thread that keeps a session with the node's daemon.

grpc is imported here and nowhere else, and only once a daemon is there, so that
a training process without one never loads it. The synchronous API is used because
grpc.aio crashes in processes that fork, and fork support is off because with
it forked DataLoader workers hang; children inherit a channel they never touch.
"""

import ctypes
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from torchperfd.link.outbox import Outbox
from torchperfd.safety.descriptors import DescriptorGuard, are_descriptors_scarce
from torchperfd.safety.interrupts import Flag, is_from_script
from torchperfd.safety.logs import Faults, log
from torchperfd.v1 import access, contract

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2, control_pb2_grpc, session_pb2

_FIRST_DELAY_S: Final = 0.1
_MAX_DELAY_S: Final = 2.0
_IDLE_POLL_S: Final = 0.5
_AFTER_DROP_S: Final = 5.0
_DROP_BUDGET_S: Final = 1.0
_DROP_POLL_S: Final = 0.005
_NO_ROOM_S: Final = 10.0
# What the outbox holds has ten megabytes at most, and a daemon takes messages of 16.
_MAX_IN_A_BUNDLE: Final = 16
_GRPC_SETTINGS: Final = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
"""Of the environment, which gRPC reads once, on its import. What fails in the stream is logged by us."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    # It pings after each message to learn how much the line takes: threads of ours that wake up beside
    # training for nothing, on a socket of this very node.
    ("grpc.http2.bdp_probe", 0),
    # Longest wait for a daemon that accepts the connection and does not answer. For as long gRPC keeps its
    # socket, even if the channel has been closed.
    ("grpc.min_reconnect_backoff_ms", 3000),
)


_is_grpc_inherited = False
"""Whether this process was forked while gRPC was active: its locks and threads are unusable since."""


def usable(sockets: tuple[str, ...]) -> tuple[str, ...]:
    """Return them, or none for now if even finding a daemon takes one of few descriptors."""
    return () if are_descriptors_scarce() else sockets


def find_listener(path: str) -> access.Listener | None:
    """Return who listens at a unix socket; None when no daemon does that may be trusted.

    One that may not be is logged, once per reason.
    """
    try:
        return access.find_listener(path)
    except access.UntrustedError as error:
        log.warn_once(f"not connected to the socket {path}: {error}")
    except OSError as error:
        if is_from_script(error):
            raise
    return None


class Stream:
    """Sends the messages of the outbox and passes on those of the daemon.

    Args:
        sockets: Where a daemon may listen, in the order to try.
        hello: Makes the first message of a session.
        on_welcome: Called with each session's Welcome.
        on_command: Called with each later message, on the stream's thread.
        faults: Where failures of the callbacks are counted.
        guard: Learns when gRPC opens descriptors.
    """

    def __init__(
        self,
        *,
        sockets: tuple[str, ...],
        hello: Callable[[], "session_pb2.ClientMessage"],
        outbox: "Outbox[session_pb2.ClientMessage]",
        on_welcome: Callable[["session_pb2.Welcome"], None],
        on_command: Callable[["session_pb2.DaemonMessage"], None],
        faults: Faults,
        guard: DescriptorGuard,
    ) -> None:
        self._guard = guard
        self._is_dropped = False
        self._is_lost = False
        self._sockets = sockets
        self._hello = hello
        self._outbox = outbox
        self._on_welcome = on_welcome
        self._on_command = on_command
        self._faults = faults
        self._stopping = Flag()
        self._is_welcomed = False
        self._bundles = False
        self._refused = False
        self._run_there = ""
        self.channel: Any = None
        """The connection that is open, or is being opened; None without one."""
        self._uses_grpc = False
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="torchperfd-stream", daemon=True)
        self.connections = 0
        """Sessions that were opened so far."""
        self.peer_uid = -1
        """The user of the daemon that was found last, as the kernel knows it; -1 before the first."""
        self.socket = ""
        """The socket of the daemon that was found last; empty before the first."""

    def start(self) -> None:
        """Begin to look for a daemon; loads grpc on the calling thread when one is there already."""
        if any(map(find_listener, usable(self._sockets))):
            load_grpc()
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The kernel's id of its thread; 0 before it runs."""
        return self._thread.native_id or 0

    @property
    def connected(self) -> bool:
        """Whether a daemon has welcomed this process and still listens."""
        return self._is_welcomed

    @property
    def session(self) -> int:
        """The number of the open session, 0 between sessions."""
        return self.connections if self.connected else 0

    def get_run(
        self, run: str, timeout: float, end_seconds: float = 0.0
    ) -> "control_pb2.GetRunResponse | None":
        """Ask the daemon for the totals of a whole run; None when it does not answer in time.

        Args:
            timeout: Seconds to wait for the daemon.
            end_seconds: At a run's end, for how much of that the daemon asks other nodes for the verdict.
        """
        control = self._control()
        if control is None:
            return None
        import grpc

        from torchperfd.v1 import control_pb2

        asked = control_pb2.GetRunRequest(run=self._run_there or run, end_seconds=end_seconds)
        try:
            return control.GetRun(asked, timeout=timeout)
        except grpc.RpcError as error:
            log.debug("no totals of the run from the daemon: %s", error)
            return None

    def download(self, capture_id: str, file: str, timeout: float) -> "Iterator[bytes]":
        """Yield a file of a capture, in pieces, from the daemon.

        Raises:
            OSError: The daemon does not send it whole within ``timeout`` seconds.
        """
        control = self._control()
        if control is None:
            raise ConnectionError("no daemon is connected")
        import grpc

        from torchperfd.v1 import control_pb2

        request = control_pb2.DownloadRequest(capture_id=capture_id, file=file)
        digest, claimed = hashlib.sha256(), ""
        try:
            for piece in control.Download(request, timeout=timeout):
                digest.update(piece.data)
                claimed = piece.sha256
                if piece.data:
                    yield piece.data
        except grpc.RpcError as error:
            # The error is the call itself, which holds a connection.
            error.__traceback__ = None
            raise ConnectionError(error.details()) from None
        if claimed != digest.hexdigest():
            raise ConnectionError("it was damaged in transfer")

    def _control(self) -> "control_pb2_grpc.ControlStub | None":
        """Return what calls the daemon's commands; None while no daemon is connected."""
        channel = self.channel
        if channel is None or not self.connected:
            return None
        from torchperfd.v1 import control_pb2_grpc

        return control_pb2_grpc.ControlStub(channel)

    def stop(self, timeout: float) -> None:
        """End the session after what was already taken from the outbox, within ``timeout`` seconds."""
        self._stopping.set()
        self._outbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout / 2)
        if (call := self._call) is not None:
            call.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout / 2)

    def abandon_in_child(self) -> None:
        """Forget the connection without touching it: the caller is a forked child.

        Destroying an inherited channel waits for threads that a child does not have, so one
        reference is leaked on purpose.
        """
        global _is_grpc_inherited
        _is_grpc_inherited = _is_grpc_inherited or self._uses_grpc
        self._leak()
        self.channel = self._call = None

    def _leak(self) -> None:
        """Keep the connection's objects for as long as the process lives."""
        for each in (self.channel, self._call):
            if each is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:  # noqa: BLE001 - a thread of ours may die, training may not
            self._faults.note("stream", error)

    def _keep_connected(self) -> None:
        delay = _FIRST_DELAY_S
        while not self._stopping.is_set():
            path, listener = self._find_daemon()
            if listener is not None:
                self.peer_uid, self.socket = listener.uid, path
                if not load_grpc():
                    return
                before = self.connections
                goes_on = self._hold_session(path, listener)
                # All that gRPC had here has been freed with the frame of that call.
                self._uses_grpc = False
                if not goes_on:
                    return
                if self.connections > before:
                    delay = _FIRST_DELAY_S
            # Jitter: a restarted daemon should not meet all its ranks in the same millisecond.
            pause = _NO_ROOM_S if self._refused else _AFTER_DROP_S if self._is_dropped else delay
            self._is_dropped = False
            self._stopping.wait(pause * random.Random().uniform(0.7, 1.0))
            delay = min(delay * 2, _MAX_DELAY_S)

    def _find_daemon(self) -> tuple[str, access.Listener | None]:
        """Return the first socket where a daemon listens, and the listener; None if there is no daemon."""
        with self._guard.opening():
            for path in usable(self._sockets):
                listener = find_listener(path)
                if listener is not None:
                    return path, listener
        return "", None

    def _hold_session(self, path: str, listener: access.Listener) -> bool:
        """Run one session until it ends; return whether to try again."""
        import grpc

        from torchperfd.v1 import session_pb2_grpc

        self._uses_grpc = True
        session_over = threading.Event()
        channel: Any = None
        try:
            with self._guard.opening():
                self._guard.begin_connecting(listener.name)
                self.channel = channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
                messages = self._messages(session_over)
                self._call = call = session_pb2_grpc.SessionStub(channel).Attach(messages)
            for message in call:
                if message.HasField("welcome"):
                    self.connections += 1
                    self._bundles = contract.BUNDLE in message.welcome.features
                    self._run_there = message.welcome.run
                    self._refused = False
                    self._guard.end_connecting()
                    self._on_welcome(message.welcome)
                    self._is_welcomed = True
                else:
                    self._obey(message)
        except grpc.RpcError as error:
            # The error is the call itself, which holds a connection; frames of its traceback hold it in turn.
            error.__traceback__ = None
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                log.warning("the daemon at %s refuses this process: %s", path, error.details())
                return False
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                if not self._refused:
                    log.warning("the daemon at %s has no room for this process: %s", path, error.details())
                self._refused = True
            log.debug("the session with %s ended: %s", path, error)
        finally:
            self._is_welcomed = False
            session_over.set()
            if self._is_lost:
                # Closing it would close the numbers of descriptors that are another's now.
                self._leak()
            self._call = self.channel = None
            if channel is not None and not self._is_lost:
                channel.close()
        return not self._is_lost

    def drop(self) -> None:
        """End the session at once, with all that gRPC has in this process; another begins some seconds later.

        Waits a second at most, on the calling thread: a connection that no daemon has answered keeps its
        descriptors for longer.
        """
        self._is_dropped = True
        if (call := self._call) is not None:
            call.cancel()
        deadline = time.monotonic() + _DROP_BUDGET_S
        while time.monotonic() < deadline and self._guard.find_grpc():
            time.sleep(_DROP_POLL_S)

    def _messages(self, session_over: threading.Event) -> Iterator["session_pb2.ClientMessage"]:
        from torchperfd.v1 import session_pb2

        self._bundles = False
        yield self._hello()
        while not session_over.is_set():
            taken = self._outbox.take(_IDLE_POLL_S, _MAX_IN_A_BUNDLE if self._bundles else 1)
            # In this order: what the end of the session closes is not lost.
            if self._guard.has_lost_poller() and not session_over.is_set():
                # Without another session: gRPC would use a core, for it waits on what is no poller.
                log.debug("the session has ended: its descriptors were closed or replaced")
                self._is_lost = True
                if self._call is not None:
                    self._call.cancel()
                return
            if len(taken) > 1:
                yield session_pb2.ClientMessage(bundle=session_pb2.Bundle(messages=taken))
            elif taken:
                yield taken[0]
            elif self._outbox.closed:
                return

    def _obey(self, message: "session_pb2.DaemonMessage") -> None:
        try:
            self._on_command(message)
        except Exception as error:  # noqa: BLE001 - one bad command must not end the session
            self._faults.note("command", error)


def load_grpc() -> bool:
    """Import grpc with fork support off; log the reason and return False where that fails.

    Best called on the script's own thread before it imports anything: two threads in the
    same packages at once may see each other's half-made modules.
    """
    if _is_grpc_inherited:
        log.warn_once(
            "this process was forked from one that was connected to a daemon, and gRPC would end it;"
            " start it with spawn to stream to the daemon (steps are still timed in this process)"
        )
        return False
    if os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() in ("1", "true"):
        log.warn_once(
            "GRPC_ENABLE_FORK_SUPPORT=1 makes forked DataLoader workers hang; "
            "unset it to stream to the daemon (steps are still timed in this process)"
        )
        return False
    try:
        with _grpc_settings():
            import grpc  # noqa: F401

            from torchperfd.v1 import control_pb2_grpc, session_pb2_grpc  # noqa: F401
    except ImportError as error:
        log.warning("cannot stream to the daemon: %s", error)
        return False
    return True


@contextmanager
def _grpc_settings() -> Iterator[None]:
    """Set up gRPC by the environment, of which neither the script nor its children see anything."""
    added = [name for name in _GRPC_SETTINGS if name not in os.environ]
    for name in added:
        os.putenv(name, _GRPC_SETTINGS[name])
    try:
        yield
    finally:
        for name in added:
            os.unsetenv(name)
