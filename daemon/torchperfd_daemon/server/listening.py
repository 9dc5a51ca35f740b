"""The daemon's socket and metrics port: locking, binding, and the HTTP server on that port.

The HTTP server has the metrics page, and the live page with its token and its workers.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from torchperfd.v1 import access, contract
from torchperfd_daemon.captures import CaptureRecord
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.web.access import PageToken, remove_token
from torchperfd_daemon.web.api import Api
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.guard import Sites
from torchperfd_daemon.web.reader import Parts
from torchperfd_daemon.web.run_rows import RUNS_FOLDER, RunsFile
from torchperfd_daemon.web.server import WebServer


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


log = logging.getLogger("torchperfd.server")


class LivePage:
    """Serves HTTP on a socket that listens already.

    Args:
        verdict: Returns the published verdict on a run.
        is_ready: Whether clients are being served.
    """

    def __init__(
        self,
        settings: ServeSettings,
        parts: Parts,
        page: MetricsPage,
        verdict: Callable[[str], Verdict | None],
        is_ready: Callable[[], bool],
        web_config: WebConfigFile | None,
    ) -> None:
        self._settings = settings
        self._token = PageToken()
        # Simulated ranks leave nothing on the disk.
        runs_file = None if settings.demo else RunsFile(settings.captures_dir / RUNS_FOLDER, parts.node)
        self.api = Api(parts, self._token, verdict, runs_file=runs_file)
        names = (settings.page_hosts or "").split(",")
        sites = Sites([settings.metrics_host, *(name.strip() for name in names)])
        self._web = WebServer(build_app(page, is_ready, web_config, self.api.routes(), sites), web_config)

    async def run(self) -> None:
        """Do what the page needs in the background, until cancelled."""
        await asyncio.gather(self.api.hub.run(), self.api.past.run())

    def on_capture(self, record: CaptureRecord) -> None:
        """A capture has ended."""
        self.api.on_capture(record)

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket, stop: Callable[[], None]) -> AsyncIterator[None]:
        """Serve within the block.

        Args:
            stop: Called when serving ends by itself: a daemon that cannot serve stops, for the service
                manager to restart it.
        """
        try:
            log.info("token of the page in %s", self._token.store(self._settings.socket))
        except TorchperfdError as error:
            # Then the page is for reading.
            log.warning("%s", error)
        task = asyncio.create_task(self._web.serve(sockets=[listener]))
        task.add_done_callback(lambda _: stop())
        try:
            yield
        finally:
            self.api.hub.close("the daemon stops")
            await self.api.close()
            self._web.leave()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, self._settings.drain_seconds)
            remove_token(self._settings.socket)
