"""The daemon: the composition root, the only place that builds the parts and knows them all."""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]

from torchperfd.v1 import access, contract, control_pb2, session_pb2
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures import (
    Analyst,
    Catalog,
    Coordinator,
    Destination,
    Keeper,
    Quota,
    Uploader,
    place,
)
from torchperfd_daemon.collectors.base import Collector, Family, Sampler
from torchperfd_daemon.collectors.cgroup import CgroupCollector
from torchperfd_daemon.collectors.cpu import CpuCollector
from torchperfd_daemon.collectors.disk import DiskCollector
from torchperfd_daemon.collectors.memory import MemoryCollector
from torchperfd_daemon.collectors.network import NetworkCollector
from torchperfd_daemon.collectors.nvml import NvmlCollector
from torchperfd_daemon.collectors.pressure import PressureCollector
from torchperfd_daemon.collectors.process import ProcessCollector
from torchperfd_daemon.collectors.rota import Rota
from torchperfd_daemon.collectors.simulated import SimulatedGpuCollector
from torchperfd_daemon.config.settings import ServeSettings
from torchperfd_daemon.demo import DemoRanks
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet import (
    Address,
    AuthInterceptor,
    Credentials,
    FanOut,
    FleetService,
    FleetView,
    JobPeers,
    Peers,
    check_listening,
    check_trust,
    listen,
    parse_peers,
    read_credentials,
)
from torchperfd_daemon.goodput import FOLDER, Accountant, Book
from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.metrics.analysis import AnalysisMetrics
from torchperfd_daemon.metrics.background import BackgroundMetrics
from torchperfd_daemon.metrics.cap import DEFAULT_SERIES, SeriesCap, by_age
from torchperfd_daemon.metrics.diagnosis import DiagnosisMetrics
from torchperfd_daemon.metrics.fleet import FleetMetrics
from torchperfd_daemon.metrics.goodput import GoodputMetrics
from torchperfd_daemon.metrics.node import NodeMetrics
from torchperfd_daemon.metrics.own import OwnMetrics
from torchperfd_daemon.metrics.page import Source
from torchperfd_daemon.metrics.process import RankProcesses
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.metrics.triggers import TriggerMetrics
from torchperfd_daemon.metrics.uploads import UploadMetrics
from torchperfd_daemon.observer import Observer
from torchperfd_daemon.ownership import GpuWatch, OwnershipCollector
from torchperfd_daemon.rpc.callers import UserLimit
from torchperfd_daemon.rpc.server import RpcServer, caller_directory
from torchperfd_daemon.service import ControlService, Node, SessionService
from torchperfd_daemon.service.permissions import Permissions, group_id
from torchperfd_daemon.service.reach import SessionReach
from torchperfd_daemon.service.survey import Held
from torchperfd_daemon.store import Store
from torchperfd_daemon.systemd import keep_watchdog_quiet, notify
from torchperfd_daemon.triggers import Actions, Plan, Runner, TriggerCounts
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.server import WebServer

log = logging.getLogger("torchperfd.server")

_SERVICES: Final = (
    session_pb2.DESCRIPTOR.services_by_name["Session"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
    "",
)
_ORPHAN_CHECK_S: Final = 1.0
# Who owns what changes with jobs, not with steps, and asks the kubelet.
_OWNERSHIP_INTERVAL_S: Final = 5.0
_RELIEF_S: Final = 2.0


class AlreadyServedError(TorchperfdError):
    """Another daemon owns the socket."""


class Daemon:
    """One node's daemon, from start to drained stop.

    Args:
        settings: What to serve where.
        plan: What to do of its own accord, and when.
    """

    def __init__(self, settings: ServeSettings, plan: Plan | None = None) -> None:
        # Clients, which may have another working directory, are told where to write.
        settings = replace(settings, captures_dir=settings.captures_dir.absolute())
        self._settings = settings
        self._plan = plan or Plan()
        self._triggers: TriggerCounts = {}
        self._store = Store(
            grace_seconds=settings.grace_seconds,
            most_per_user=settings.max_sessions_per_user,
            most=settings.max_sessions,
        )
        quota = Quota(
            bytes=settings.captures_max_bytes,
            age_seconds=settings.captures_max_age_seconds,
            count=settings.captures_max_count,
            capture_bytes=settings.captures_max_bytes_each,
            free_bytes=settings.captures_min_free_bytes,
        )
        self._catalog = Catalog(settings.captures_dir, quota)
        self._uploader = _uploader(settings, self._catalog)
        self._keeper = Keeper(self._catalog, uploads=self._uploader is not None)
        self._analyst = Analyst(self._catalog) if _analyses(settings) else None
        if self._analyst is not None:
            self._catalog.on_ended = self._analyst.submit
        self._coordinator = Coordinator(self._catalog)
        # What never was is not kept.
        goodput = None if settings.demo else settings.captures_dir / FOLDER
        self._accountant = Accountant(self._store, Book(goodput, socket.gethostname()))
        self._instance = secrets.token_hex(8)
        self._credentials = self._read_credentials()
        self._interceptor = AuthInterceptor(lambda: self._credentials)
        self._fleet_address = Address(*settings.fleet_address) if settings.fleet_address else None
        if self._fleet_address is not None:
            check_listening(self._fleet_address, self._credentials)
        peers = parse_peers(settings.fleet_peers, own=self._fleet_address) if settings.fleet_peers else None
        self._peers = Peers(peers) if peers is not None else None
        self._job_peers = peers if isinstance(peers, JobPeers) else None
        if self._job_peers is not None:
            check_trust(self._credentials)
        self._admin_group = group_id(settings.admin_group)
        self._ready = False
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT, or, when embedded, until nobody needs it.

        Raises:
            TorchperfdError: Something cannot be served; the message names the fix.
        """
        settings = self._settings
        web_config = WebConfigFile(settings.web_config_file) if settings.web_config_file else None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload, web_config)
        with _own(settings.socket), _listen(settings) as listener:
            _note_place(settings, self._uploader)
            ranks = RankProcesses(self._store)
            gpus = GpuWatch(SimulatedGpuCollector() if settings.demo else NvmlCollector(), ranks)
            demo = DemoRanks(self._store, gpus.newest, socket.gethostname()) if settings.demo else None
            owners = demo or OwnershipCollector(ranks, gpus.newest)
            interval = settings.interval_seconds
            seldom = max(interval, _OWNERSHIP_INTERVAL_S)
            host = [Sampler(collector, interval) for collector in _host_collectors(ranks)]
            driver, owner = Sampler(gpus, interval), Sampler(owners, seldom)
            # What asks a driver or another service may take its time, and has a thread of its own.
            rotas = [Rota(host, interval), Rota([driver], interval), Rota([owner], seldom)]
            samplers = [*host, driver, owner]
            host, port = listener.getsockname()[:2]
            scheme = "https" if web_config is not None and web_config.current().tls else "http"
            url = f"{scheme}://{_shown(host)}:{port}/metrics"
            node = Node(socket.gethostname(), url, settings.captures_dir)
            fan_out = FanOut(lambda: self._credentials)
            fleet = FleetView(self._peers, fan_out, self._coordinator, self._instance, node.name)
            others = fleet if self._peers is not None else None
            callers = caller_directory(settings)
            sessions = SessionService(
                self._store,
                self._coordinator,
                node,
                self._changed.set,
                others,
                self._job_peers,
                callers=callers,
                limit=UserLimit("sessions", settings.max_sessions_per_user, settings.max_sessions),
            )

            def families() -> Iterator[Family]:
                return itertools.chain.from_iterable(sampler.families for sampler in samplers)

            observer = Observer(
                self._store,
                sessions.stacks_of,
                families,
                gpus.newest,
                lambda identity: owners.of(identity).gpu_uuid,
            )
            cap = SeriesCap(DEFAULT_SERIES, lambda: by_age(self._store))
            measured: list[Source] = [
                TrainingMetrics(self._store, owners.of),
                DiagnosisMetrics(self._store, observer),
                NodeMetrics(samplers),
            ]
            runner = Runner(
                self._plan,
                self._store,
                # Without the cap: what is left out of a page still counts.
                MetricsPage(measured).collect,
                Actions(self._coordinator, self._catalog, SessionReach(self._store, sessions)),
                counts=self._triggers,
            )
            relief = WorkerHealth("collectors")
            workers = [
                self._keeper.health,
                self._accountant.health,
                observer.health,
                sessions.pulses.health,
                relief,
                *([runner.health] if runner.has_work else []),
                *([self._uploader.health] if self._uploader else []),
                *([self._analyst.health] if self._analyst else []),
            ]
            page = MetricsPage(
                [
                    TrainingMetrics(self._store, owners.of, cap),
                    DiagnosisMetrics(self._store, observer, cap),
                    NodeMetrics(samplers),
                    OwnMetrics(self._store, self._coordinator.counts, self._keeper.counts),
                    BackgroundMetrics(workers),
                    TriggerMetrics(self._triggers),
                    GoodputMetrics(self._accountant.settled_seconds),
                    *([UploadMetrics(self._uploader.counts)] if self._uploader else []),
                    *([FleetMetrics(lambda: self._interceptor.refused_calls)] if self._fleet_address else []),
                    *([AnalysisMetrics(self._store, self._analyst.counts)] if self._analyst else []),
                ],
                cap,
            )
            control = ControlService(
                self._store,
                sessions,
                self._coordinator,
                self._catalog,
                node,
                fleet,
                goodput=self._accountant.report,
                verdict=observer.verdict,
                families=families,
                permissions=Permissions(callers, self._admin_group),
            )
            checks = health.HealthServicer()
            rpc = RpcServer(settings, callers, sessions, control, checks)
            await rpc.start()
            fleet_rpc = await self._start_fleet(sessions, node.name, observer.verdict)
            web = WebServer(
                build_app(page, lambda: self._ready, web_config, sessions.pulses.freshen), web_config
            )
            web_task = asyncio.create_task(web.serve(sockets=[listener]))
            # A daemon without its page is no daemon: leave, and let the service manager restart it.
            web_task.add_done_callback(lambda _: self._stop.set())
            for rota in rotas:
                rota.start()
            self._keeper.start()
            if self._analyst is not None:
                self._analyst.start()
            uploads = asyncio.create_task(self._uploader.run()) if self._uploader else None
            triggers = asyncio.create_task(runner.run(self._catalog))
            reliefs = asyncio.create_task(_relieve(rotas, relief))
            accounts = asyncio.create_task(self._accountant.run())
            pulses = asyncio.create_task(sessions.pulses.run())
            watches = asyncio.create_task(observer.run())
            trainer = asyncio.create_task(demo.run()) if demo else None
            watchdog = asyncio.create_task(keep_watchdog_quiet())
            await self._announce(checks, ready=True)
            log.info("metrics on %s, clients on %s", node.metrics_url, settings.socket)
            try:
                await self._until_unneeded(sessions)
            finally:
                log.info("stopping")
                watchdog.cancel()
                if trainer is not None:
                    trainer.cancel()
                await self._announce(checks, ready=False)
                triggers.cancel()
                watches.cancel()
                pulses.cancel()
                await asyncio.wait((triggers, watches, pulses), timeout=1.0)
                await rpc.stop(grace=min(1.0, settings.drain_seconds))
                if fleet_rpc is not None:
                    await fleet_rpc.stop(grace=min(1.0, settings.drain_seconds))
                await fan_out.close()
                accounts.cancel()
                await asyncio.wait((accounts,), timeout=1.0)
                self._accountant.close()
                web.leave()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(web_task, settings.drain_seconds)
                reliefs.cancel()
                if uploads is not None:
                    uploads.cancel()
                    # What it holds of the interpreter must be let go before that ends.
                    await asyncio.wait((uploads,), timeout=min(1.0, settings.drain_seconds))
                self._keeper.stop()
                if self._analyst is not None:
                    self._analyst.stop()
                for rota in rotas:
                    rota.stop()

    def _read_credentials(self) -> Credentials:
        settings = self._settings
        return read_credentials(
            settings.fleet_token_file, settings.fleet_tls_cert, settings.fleet_tls_key, settings.fleet_tls_ca
        )

    def _reload(self, web_config: WebConfigFile | None) -> None:
        """Read the files of credentials and certificates again; those that are wrong change nothing."""
        log.info("SIGHUP: reading credentials and certificates again")
        if web_config is not None:
            web_config.current()
        try:
            newest = self._read_credentials()
            if newest.kinds != self._credentials.kinds:
                raise UsageError(
                    "token or TLS of the fleet has come or gone", "restart the daemon to change that"
                )
        except TorchperfdError as error:
            log.error("%s; the fleet's credentials from before stay in force", error)
        else:
            self._credentials = newest

    async def _start_fleet(
        self, sessions: SessionService, node: str, verdict: Held
    ) -> grpc.aio.Server | None:
        """Listen for daemons of other nodes, if that is asked for."""
        if self._fleet_address is None:
            return None
        service = FleetService(
            self._store, sessions, self._coordinator, self._catalog, self._instance, node, verdict
        )
        server, address = await listen(self._fleet_address, self._interceptor, service)
        log.info("the fleet may ask on %s", address)
        return server

    async def _until_unneeded(self, sessions: SessionService) -> None:
        if not self._settings.embedded:
            await self._stop.wait()
            return
        owner = asyncio.create_task(_owner_gone())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((owner, stop), return_when=asyncio.FIRST_COMPLETED)
            while not self._stop.is_set() and sessions.count:
                # Other ranks of the run are still here; the owner was only the first to finish.
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _ORPHAN_CHECK_S)
        finally:
            owner.cancel()
            stop.cancel()

    async def _announce(self, checks: health.HealthServicer, *, ready: bool) -> None:
        self._ready = ready
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in _SERVICES:
            await checks.set(service, status)
        notify("READY=1" if ready else "STOPPING=1")


def _analyses(settings: ServeSettings) -> bool:
    # A run's own daemon shares its cores, and the next that is typed is `torchperfd analyze`.
    return settings.analyze_captures and not settings.embedded


def _uploader(settings: ServeSettings, catalog: Catalog) -> Uploader | None:
    """Return what uploads captures, if that is asked for."""
    if settings.captures_upload is None:
        return None
    destination = Destination(settings.captures_upload)
    destination.check_apart(settings.captures_dir)
    return Uploader(catalog, destination)


def _note_place(settings: ServeSettings, uploader: Uploader | None) -> None:
    """Note beside the captures where they go, for the commands that ask no daemon."""
    if uploader is not None:
        place.note(settings.captures_dir, uploader.url)
    elif not settings.embedded:
        # A run's own daemon says nothing about what the user's other daemons do.
        place.forget(settings.captures_dir)


async def _relieve(rotas: Sequence[Rota], health: WorkerHealth) -> None:
    while True:
        await asyncio.sleep(_RELIEF_S)
        try:
            for rota in rotas:
                rota.relieve()
            health.succeeded(time.time())
        except Exception:
            # Not even a thread may be left to be had; then the next time.
            if health.failed():
                log.exception("collectors that hang cannot be replaced")


def _host_collectors(ranks: RankProcesses) -> list[Collector]:
    return [
        CpuCollector(),
        MemoryCollector(),
        DiskCollector(),
        NetworkCollector(),
        PressureCollector(),
        ProcessCollector(ranks),
        CgroupCollector(ranks),
    ]


@contextlib.contextmanager
def _own(path: str) -> Iterator[None]:
    """Hold the socket's lock file, so that no second daemon takes the path over."""
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
def _listen(settings: ServeSettings) -> Iterator[socket.socket]:
    """Bind the metrics port; an embedded daemon takes any when its own is in use."""
    host = settings.metrics_host
    ports = (settings.metrics_port, 0) if settings.embedded else (settings.metrics_port,)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            # Here, not in uvicorn: whoever hears that we are ready may connect, and of two
            # daemons that have bound the same port at once, only one gets past this.
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


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


async def _owner_gone() -> None:
    """Return once standard input is closed: whoever started us holds its other end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()
