"""The life of the daemon's process: its socket and metrics port, its readiness, and when it ends.

Readiness and watchdog follow systemd's protocol.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]

from torchperfd.v1 import access, contract, control_pb2, session_pb2
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.web.access import PageToken, Parts, remove_token
from torchperfd_daemon.web.api import Api
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.guard import Sites
from torchperfd_daemon.web.run_rows import RUNS_FOLDER, RunsFile
from torchperfd_daemon.web.server import WebServer

log = logging.getLogger("torchperfd.server")


_SERVICES: Final = (
    session_pb2.DESCRIPTOR.services_by_name["Session"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
    "",
)


def notify_systemd(state: str) -> bool:
    """Send a state such as ``READY=1``; return whether a service manager received it.

    See sd_notify(3): a leading ``@`` names an abstract socket.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return False
    return True


async def announce(checks: health.HealthServicer, *, ready: bool) -> None:
    """Report to clients and to systemd that the daemon serves, or stops."""
    status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in _SERVICES:
        await checks.set(service, status)
    notify_systemd("READY=1" if ready else "STOPPING=1")


def watchdog_seconds() -> float | None:
    """Return systemd's watchdog timeout for this process; None when there is none.

    See sd_watchdog_enabled(3).
    """
    microseconds, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6


async def keep_watchdog_quiet(stopped: Callable[[], Sequence[str]] = tuple) -> None:
    """Notify systemd's watchdog twice per timeout; return at once if there is none.

    Args:
        stopped: Returns the workers that have stopped; while there are any, the watchdog is not notified, so
            that systemd restarts the service.
    """
    period = watchdog_seconds()
    while period is not None:
        if names := stopped():
            log.error("%s has stopped: systemd's watchdog is not notified", " and ".join(names))
        else:
            notify_systemd("WATCHDOG=1")
        await asyncio.sleep(period / 2)


_RANKS_CHECK_S: Final = 1.0
LAST_QUESTION_S: Final = 0.8
"""How long an embedded daemon waits for the question of the node on which the job's first rank ends.

Less than the second by which an exit may be delayed: the process that started the daemon waits for its end.
"""


class Lifetime:
    """Waits for the end of the daemon.

    Args:
        embedded: End once standard input is closed and no rank is connected.
    """

    def __init__(self, *, embedded: bool) -> None:
        self._embedded = embedded
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._was_asked = asyncio.Event()

    def stop(self) -> None:
        """End now."""
        self._stop.set()

    def ranks_changed(self) -> None:
        """Check again whether any rank is connected."""
        self._changed.set()

    def was_asked(self) -> None:
        """Note that a peer has asked for the end of a run."""
        self._was_asked.set()

    async def wait(
        self, ranks: Callable[[], int], awaits_question: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when the daemon should end.

        Args:
            ranks: Returns how many ranks are connected.
            awaits_question: Returns whether a peer may still ask about a run that has ended here.
        """
        if not self._embedded:
            await self._stop.wait()
            return
        owner = asyncio.create_task(_owner_gone())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((owner, stop), return_when=asyncio.FIRST_COMPLETED)
            # Other ranks of the run may still be here; the owner was only the first to finish.
            while not self._stop.is_set() and ranks():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _RANKS_CHECK_S)
            if not self._stop.is_set() and awaits_question():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._was_asked.wait(), LAST_QUESTION_S)
        finally:
            owner.cancel()
            stop.cancel()


async def _owner_gone() -> None:
    """Return once standard input is closed: the process that started us holds its other end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()


class AlreadyServedError(TorchperfdError):
    """Another daemon owns the socket."""


def check_socket_path(path: str) -> None:
    """Refuse a path that no socket can have.

    Raises:
        UsageError: It is too long.
    """
    if len(os.fsencode(path)) > contract.MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"the socket path has {len(os.fsencode(path))} bytes, the kernel allows"
            f" {contract.MAX_SOCKET_PATH_BYTES}",
            "choose a shorter one with --socket",
        )


@contextlib.contextmanager
def own_socket(path: str) -> Iterator[None]:
    """Hold the socket's lock file, so that no second daemon takes the path over.

    Raises:
        AlreadyServedError: Another daemon holds the lock.
        TorchperfdError: The directory or the lock file cannot be used.
    """
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


def metrics_url(listener: socket.socket, web_config: WebConfigFile | None) -> str:
    """Return the URL of the metrics page, as other nodes reach it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if web_config is not None and web_config.current().tls else "http"
    return f"{scheme}://{public_host(host)}:{port}/metrics"


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
