"""The HTTP side of the daemon: the metrics page, and the live page with its token and its workers."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable

from torchperfd_daemon.captures import CaptureRecord
from torchperfd_daemon.config.settings import ServeSettings
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.web.access import PageToken, remove_token
from torchperfd_daemon.web.api import Api
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.guard import Sites
from torchperfd_daemon.web.reader import Parts
from torchperfd_daemon.web.run_rows import RUNS_FOLDER, RunsFile
from torchperfd_daemon.web.server import WebServer

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
