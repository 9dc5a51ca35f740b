"""The daemon's socket and metrics port: locking and binding."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from torchperfd.v1 import access, contract
from torchperfd_daemon.config.settings import ServeSettings
from torchperfd_daemon.errors import TorchperfdError, UsageError


class AlreadyServedError(TorchperfdError):
    """Another daemon owns the socket."""


@contextlib.contextmanager
def own_socket(path: str) -> Iterator[None]:
    """Hold the socket's lock file, so that no second daemon takes the path over.

    Raises:
        UsageError: The path is too long for a socket.
        AlreadyServedError: Another daemon holds the lock.
        TorchperfdError: The directory or the lock file cannot be used.
    """
    if len(os.fsencode(path)) > contract.MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"the socket path has {len(os.fsencode(path))} bytes, the kernel allows"
            f" {contract.MAX_SOCKET_PATH_BYTES}",
            "choose a shorter one with --socket",
        )
    place = Path(path)
    with contextlib.ExitStack() as held:
        try:
            directory = access.open_directory(str(place.parent), create=True)
            held.callback(os.close, directory)
            lock = access.open_file(directory, f"{place.name}.lock", os.O_RDWR | os.O_CREAT)
            held.callback(os.close, lock)
        except access.UntrustedError as error:
            raise TorchperfdError(f"cannot listen on {path}: {error}") from error
        except OSError as error:
            raise TorchperfdError(
                f"cannot create {path}.lock: {error.strerror}", "choose another path with --socket"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyServedError(
                f"another daemon serves {path}", "use it, or choose another path with --socket"
            ) from None
        held.callback(_unlink_socket, directory, place.name)
        yield


def _unlink_socket(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


@contextlib.contextmanager
def listen(settings: ServeSettings) -> Iterator[socket.socket]:
    """Bind the metrics port; an embedded daemon takes any free one when its own is in use.

    Raises:
        TorchperfdError: The address cannot be used.
    """
    host = settings.metrics_host
    ports = (settings.metrics_port, 0) if settings.embedded else (settings.metrics_port,)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # Not left to uvicorn: clients may connect as soon as the daemon reports that it is ready, and
            # of two daemons that have bound the same port at once, only one gets past this.
            listener.listen(128)
        except OSError as error:
            listener.close()
            if port == ports[-1]:
                raise TorchperfdError(
                    f"cannot serve metrics on {host}:{port}: {error.strerror}",
                    "choose another address with --metrics-address",
                ) from error
            continue
        with listener:
            yield listener
        return


def public_host(host: str) -> str:
    """Return the host that other nodes reach this address by, in the form of a URL."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
