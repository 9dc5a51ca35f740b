"""The daemon's part of the lake: its worker over the other parts, from start to the last batch."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator

from torchperfd_daemon.background import WorkerHealth, run_in_background
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuReading, gpu_model
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.goodput.tracker import GoodputTracker
from torchperfd_daemon.lake.journal import FOLDER, Journal
from torchperfd_daemon.lake.recorder import Recorder, Sources
from torchperfd_daemon.lake.uploader import LakeWorker, preferred_form, sender_command
from torchperfd_daemon.metrics.page import lake_metrics
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.ownership import UserNames
from torchperfd_daemon.store.store import Store


class Lake:
    """Has the history of this node written to the lake; does nothing where none is configured."""

    def __init__(self, settings: ServeSettings) -> None:
        # Simulated ranks have no history.
        self._url = None if settings.demo else settings.lake
        self._settings = settings
        self._recorder: Recorder | None = None
        self._worker: LakeWorker | None = None

    @property
    def health(self) -> list[WorkerHealth]:
        """The health of the worker, if there is one."""
        return [self._worker.health] if self._worker is not None else []

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the worker, if there is one."""
        if self._worker is not None:
            yield from lake_metrics(self._worker.counts)

    def capture_ended(self, record: CaptureRecord) -> None:
        """Record a capture that has ended."""
        if self._recorder is not None:
            self._recorder.capture_ended(record)

    def start(
        self,
        stack: contextlib.AsyncExitStack,
        store: Store,
        observer: Observer,
        goodput: GoodputTracker | None,
        gpus: Callable[[], Iterable[GpuReading]],
    ) -> None:
        """Run the worker until the stack unwinds, which records what there is by then."""
        if self._url is None:
            return
        node, users = socket.gethostname(), UserNames()
        sources = Sources(
            store,
            observer.verdicts,
            observer.verdict,
            observer.lost_seconds,
            goodput.report if goodput is not None else None,
            users.look_up,
            users.of,
            lambda uuid: gpu_model(gpus(), uuid),
        )
        self._recorder = Recorder(node, sources)
        folder = self._settings.captures_dir / FOLDER
        command = sender_command(self._url, self._settings.lake_cluster, str(folder), node)
        self._worker = LakeWorker(self._recorder, Journal(folder, node), command, preferred_form())
        run_in_background(stack, self._worker.run())
        stack.push_async_callback(self._worker.finish)

    async def flush(self) -> None:
        """Send what is left, once all else has stopped and the socket is another daemon's to take."""
        if self._worker is not None:
            await self._worker.flush(self._settings.drain_seconds)
