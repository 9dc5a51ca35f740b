"""The daemon's gRPC server: on a private socket, behind the proxy that identifies callers."""

import contextlib
import errno
import os
import resource
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]

from torchperfd.v1 import control_pb2_grpc, session_pb2_grpc
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.callers import CallerDirectory
from torchperfd_daemon.rpc.interceptors import MAX_MESSAGE_BYTES, CallCounter, CommandRates, RequestGuard
from torchperfd_daemon.rpc.peer_proxy import OnHandover, PeerProxy

_RPC_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A client has one session and sends few other requests.
    ("grpc.max_concurrent_streams", 128),
    # It pings after each message to learn how much the line takes. Ours is a socket on this node, and the
    # answers woke the daemon up three times as often as the messages.
    ("grpc.http2.bdp_probe", 0),
)
_MAX_DESCRIPTORS: Final = 1 << 16
_SPARE_DESCRIPTORS: Final = 256
_DESCRIPTORS_PER_CONNECTION: Final = 7
"""Its three sockets, and four files on its process."""
_MORE_CONNECTIONS: Final = 64
"""Than sessions that a user may have: for commands, and for the moment between two sessions."""


class RpcServer:
    """Serves clients and commands on a unix socket."""

    def __init__(
        self,
        settings: ServeSettings,
        callers: CallerDirectory,
        sessions: session_pb2_grpc.SessionServicer,
        control: control_pb2_grpc.ControlServicer,
        checks: health.HealthServicer,
        calls: CallCounts,
        on_handover: OnHandover | None = None,
    ) -> None:
        self._settings = settings
        interceptors = (CallCounter(calls), CommandRates(callers), RequestGuard())
        self._server = grpc.aio.server(options=_RPC_OPTIONS, interceptors=interceptors)
        session_pb2_grpc.add_SessionServicer_to_server(sessions, self._server)
        control_pb2_grpc.add_ControlServicer_to_server(control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self._callers = callers
        self._on_handover = on_handover
        self._proxy: PeerProxy | None = None
        self._directory = -1
        self._private = ""

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            TorchperfdError: The socket cannot be made.
        """
        path = Path(self._settings.socket)
        try:
            self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            # Through the descriptor, because the path of a socket has a maximum length.
            self._private = f"/proc/self/fd/{self._directory}/.{path.name}.rpc"
            with _private_directory(self._directory, path.name) as private:
                self._server.add_insecure_port(f"unix:{private}/rpc")
                await self._server.start()
                _set_mode(f"{private}/rpc", 0o600)
                os.rename(f"{private}/rpc", self._private)  # noqa: PTH104 - by way of descriptors
            listener = _bound(path, self._settings.socket_mode)
        except (RuntimeError, OSError) as error:
            raise TorchperfdError(
                f"cannot listen on {path}: {error}", "choose another path with --socket"
            ) from error
        self._proxy = PeerProxy(listener, self._private, self._callers, self._on_handover)
        await self._proxy.start()

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, and wait ``grace`` seconds for those in progress."""
        if self._proxy is not None:
            self._proxy.stop_accepting()
        await self._server.stop(grace)
        if self._proxy is not None:
            self._proxy.close()
        if self._directory >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._private)  # noqa: PTH108 - by way of the descriptor
            os.close(self._directory)
            self._directory = -1


def caller_directory(settings: ServeSettings) -> CallerDirectory:
    """Return a directory with as many connections as the settings' sessions need, if descriptors last."""
    room = max(1, (_allowed_descriptors() - _SPARE_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION)
    return CallerDirectory(
        most_per_user=min(room, settings.max_sessions_per_user + _MORE_CONNECTIONS),
        most=min(room, settings.max_sessions + _MORE_CONNECTIONS),
    )


def _allowed_descriptors() -> int:
    """Return how many descriptors this process may have, after asking for what it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_MAX_DESCRIPTORS, hard) if hard != resource.RLIM_INFINITY else _MAX_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return min(soft, _MAX_DESCRIPTORS) if soft != resource.RLIM_INFINITY else _MAX_DESCRIPTORS


@contextlib.contextmanager
def _private_directory(parent: int, name: str) -> Iterator[str]:
    """Make a directory for this user only, remove it at the end, and yield its path by a descriptor.

    gRPC makes its socket with the permissions that the process's umask leaves. Setting that would also change
    the files which other threads create meanwhile.
    """
    made = f".{name}.{secrets.token_hex(8)}"
    os.mkdir(made, 0o700, dir_fd=parent)
    try:
        descriptor = os.open(made, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):  # not empty where gRPC's socket could not be moved
            os.rmdir(made, dir_fd=parent)


def _set_mode(path: str, mode: int) -> None:
    """Set the permission bits of a socket of this user's, and of no other file that is at the path by now.

    Raises:
        OSError: There is another file.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise FileExistsError(errno.EEXIST, "another file has taken its place", path)
        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # noqa: PTH101
    finally:
        os.close(descriptor)


def _bound(path: Path, mode: int) -> socket.socket:
    """Return a socket bound to a path; a socket that an earlier daemon left there is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        # The file gets these bits, of which the umask takes some away.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        _set_mode(str(path), mode)
    except OSError:
        listener.close()
        raise
    return listener
