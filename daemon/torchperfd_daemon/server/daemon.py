"""The daemon: the composition root, the only module that builds and connects all components."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]

from torchperfd_daemon.background import StoppedWorkers, run_in_background
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.fleet.series_peers import SeriesPeers
from torchperfd_daemon.fleet.service import FleetService
from torchperfd_daemon.fleet.transport import AuthInterceptor, FanOut
from torchperfd_daemon.fleet.transport import listen as listen_to_fleet
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.goodput.store import FOLDER, GoodputStore
from torchperfd_daemon.goodput.tracker import GoodputTracker
from torchperfd_daemon.metrics.health import DaemonHealth
from torchperfd_daemon.metrics.page import (
    MetricsPage,
    analysis_metrics,
    background_metrics,
    capture_metrics,
    fleet_metrics,
    goodput_metrics,
    own_metrics,
    trigger_metrics,
    upload_metrics,
)
from torchperfd_daemon.observer.line_sampler import LineSampler
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.rpc.callers import CallerDirectory, UserLimit
from torchperfd_daemon.rpc.server import RpcServer, caller_directory
from torchperfd_daemon.server.checked_settings import check_settings
from torchperfd_daemon.server.exports import Exports
from torchperfd_daemon.server.lake import Lake
from torchperfd_daemon.server.lifecycle import (
    Lifetime,
    LivePage,
    announce,
    keep_watchdog_quiet,
    listen,
    metrics_url,
    own_socket,
)
from torchperfd_daemon.server.pushes import Pushes
from torchperfd_daemon.server.workers import CaptureWorkers, NodeSamplers, StepCheck
from torchperfd_daemon.service.control import ControlService
from torchperfd_daemon.service.handover import CaptureHandovers
from torchperfd_daemon.service.permissions import Permissions
from torchperfd_daemon.service.rank_session import UserWatch
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.simulated import SimulatedRanks
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.triggers.plan import Plan
from torchperfd_daemon.triggers.rules import Actions, TriggerCounts
from torchperfd_daemon.triggers.runner import Runner
from torchperfd_daemon.web.access import Parts
from torchperfd_daemon.web.config_file import WebConfigFile

log = logging.getLogger("torchperfd.server")


@dataclass(frozen=True, slots=True)
class _Clients:
    """What serves training processes, as the daemon's other parts use it."""

    node: Node
    callers: CallerDirectory
    sessions: SessionService
    fleet: FleetView


@dataclass(frozen=True, slots=True)
class _Observed:
    """What watches the runs, and the page that shows them."""

    observer: Observer
    triggers: Runner
    page: MetricsPage


class Daemon:
    """One node's daemon, from start to drained stop.

    Args:
        plan: Triggers and schedules of automatic captures.

    Raises:
        TorchperfdError: The settings, or what they name, are not valid.
    """

    def __init__(self, settings: ServeSettings, plan: Plan | None = None) -> None:
        self._checked = check_settings(settings)
        self._settings = settings = self._checked.settings
        self._plan = plan or Plan()
        self._triggers: TriggerCounts = {}
        self._health = DaemonHealth()
        self._store = Store(
            grace_seconds=settings.grace_seconds,
            most_per_user=settings.max_sessions_per_user,
            most=settings.max_sessions,
        )
        self._captures = CaptureWorkers(settings, self._checked.destination)
        self._catalog = self._captures.catalog
        self._step_check = StepCheck(self._store, self._catalog)
        self._catalog.on_armed = self._step_check.begin
        self._catalog.on_ended = self._after_capture
        self._coordinator = Coordinator(self._catalog)
        # Simulated ranks leave no accounts on the disk.
        goodput = None if settings.demo else settings.captures_dir / FOLDER
        self._goodput = (
            GoodputTracker(self._store, GoodputStore(goodput, socket.gethostname()))
            if "goodput" in settings.collectors
            else None
        )
        self._lake = Lake(settings)
        self._instance = secrets.token_hex(8)
        self._credentials = self._checked.credentials
        self._interceptor = AuthInterceptor(self._credentials.current)
        self._fleet_address = self._checked.fleet_address
        self._peers = self._checked.peers
        self._job_peers = self._checked.job_peers
        self._series = self._checked.series
        self._ready = False
        self._on_capture: Callable[[CaptureRecord], None] = lambda _: None
        self._lifetime = Lifetime(embedded=settings.embedded)

    def _after_capture(self, record: CaptureRecord) -> None:
        self._step_check.end(record)
        self._captures.submit(record)
        self._lake.capture_ended(record)
        self._on_capture(record)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; when embedded, until the owner and the last rank have left.

        Raises:
            TorchperfdError: A socket or port cannot be served; the message states what to do.
        """
        settings = self._settings
        web_config = self._checked.web_config
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._lifetime.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload, web_config)
        # Unwinds in reverse order: the observers stop first, then the servers, then the samplers.
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._health.counting_errors())
            stack.push_async_callback(self._lake.flush)
            stack.enter_context(own_socket(settings.socket))
            listener = stack.enter_context(listen(settings))
            node = Node(
                socket.gethostname(),
                metrics_url(listener, web_config),
                settings.captures_dir,
                settings.is_service,
            )
            samplers = self._collect(stack)
            self._captures.start(stack)
            clients = self._admit_clients(stack, node)
            observed = self._observe(stack, samplers, clients.sessions)
            control = self._control(samplers, clients, observed.observer)
            page = self._page(samplers, control, clients, observed, web_config)
            await stack.enter_async_context(page.serving(listener, self._lifetime.stop))
            checks = await self._serve(stack, control, clients, observed.observer)
            run_in_background(
                stack,
                observed.triggers.run(self._catalog),
                observed.observer.run(),
                self._step_check.run(),
                page.run(),
                UserWatch(clients.sessions.open_sessions).run(),
            )
            workers = StoppedWorkers(observed.observer.health, samplers.health, *samplers.watched)
            run_in_background(stack, keep_watchdog_quiet(workers.names))
            await self._announce(checks, ready=True)
            stack.push_async_callback(self._announce, checks, ready=False)
            log.info("metrics on %s, clients on %s", node.metrics_url, settings.socket)
            stack.callback(log.info, "stopping")
            await self._lifetime.wait(lambda: clients.sessions.count, self._awaits_question)

    def _collect(self, stack: contextlib.AsyncExitStack) -> NodeSamplers:
        """Start the node's samplers, and a simulated job if that is configured."""
        settings = self._settings
        samplers = NodeSamplers(
            self._store,
            settings.interval_seconds,
            simulated=settings.demo,
            names_users=settings.user_label,
            collectors=settings.collectors,
        )
        samplers.start()
        stack.callback(samplers.stop)
        run_in_background(stack, samplers.run())
        if settings.demo:
            ranks = SimulatedRanks(self._store, samplers.gpus.newest, socket.gethostname())
            run_in_background(stack, ranks.run())
        return samplers

    def _admit_clients(self, stack: contextlib.AsyncExitStack, node: Node) -> _Clients:
        """Build what serves training processes and reaches the daemons of other nodes."""
        settings = self._settings
        fan_out = FanOut(self._credentials.current)
        stack.push_async_callback(fan_out.close)
        fleet = FleetView(self._peers, fan_out, self._coordinator, self._instance, node.name)
        callers = caller_directory(settings)
        sessions = SessionService(
            self._store,
            self._coordinator,
            node,
            self._lifetime.ranks_changed,
            fleet if self._peers is not None else None,
            self._job_peers,
            callers=callers,
            limit=UserLimit("sessions", settings.max_sessions_per_user, settings.max_sessions),
        )
        return _Clients(node, callers, sessions, fleet)

    def _observe(
        self, stack: contextlib.AsyncExitStack, samplers: NodeSamplers, sessions: SessionService
    ) -> _Observed:
        """Account for goodput, and build what watches the runs and the page that shows them."""
        if self._goodput is not None:
            stack.callback(self._goodput.close)
            run_in_background(stack, self._goodput.run())
        owners = samplers.owners
        observer = Observer(
            self._store,
            sessions.stacks_of,
            samplers.families,
            samplers.gpus.newest,
            lambda identity: owners.of(identity).gpu_uuid,
            lines=LineSampler(
                sessions.sample_stacks,
                self._coordinator.is_capturing,
                threads_of=partial(sessions.sample_stacks, threads_only=True),
            ),
        )
        self._coordinator.advice_of = observer.settle_loader_advice
        self._lake.start(stack, self._store, observer, self._goodput, samplers.gpus.newest)
        exports = Exports(self._settings, self._store, samplers, observer)
        triggers = Runner(
            self._plan,
            self._store,
            observer.findings,
            exports.of_triggers().collect,
            Actions(self._coordinator, self._catalog, sessions.of_run, sessions.stacks_of_run),
            counts=self._triggers,
        )
        pushes = Pushes(self._checked, self._store, samplers, observer, socket.gethostname())
        self._export(exports, observer, samplers, triggers, pushes)
        page = exports.page()
        pushes.start(stack, page.collect)
        return _Observed(observer, triggers, page)

    def _export(
        self,
        exports: Exports,
        observer: Observer,
        samplers: NodeSamplers,
        triggers: Runner,
        pushes: Pushes,
    ) -> None:
        """Add what the daemon knows of itself and of captures to the metrics page."""
        captures = self._captures
        workers = [
            *captures.health,
            *([self._goodput.health] if self._goodput is not None else []),
            observer.health,
            self._step_check.health,
            samplers.health,
            *([triggers.health] if triggers.has_work else []),
            *pushes.health,
            *self._lake.health,
        ]
        exports.add("self", *pushes.sources, partial(own_metrics, self._store))
        exports.add("captures", partial(capture_metrics, self._coordinator.counts, captures.retention.counts))
        exports.add("self", self._health.families, partial(background_metrics, workers), self._lake.families)
        exports.add("captures", partial(trigger_metrics, self._triggers))
        if self._goodput is not None:
            exports.add("goodput", partial(goodput_metrics, self._goodput.settled_seconds))
        if captures.uploader is not None:
            exports.add("captures", partial(upload_metrics, captures.uploader.counts))
        if self._fleet_address is not None:
            fleet = partial(fleet_metrics, lambda: self._interceptor.refused_calls, self._dropped_peers)
            exports.add("self", fleet)
        if captures.analyst is not None:
            exports.add("captures", partial(analysis_metrics, self._store, captures.analyst.counts))

    def _dropped_peers(self) -> int:
        return self._job_peers.dropped if self._job_peers is not None else 0

    def _control(self, samplers: NodeSamplers, clients: _Clients, observer: Observer) -> ControlService:
        return ControlService(
            self._store,
            clients.sessions,
            self._coordinator,
            self._catalog,
            clients.node,
            clients.fleet if self._series is None else SeriesPeers(clients.fleet, self._series),
            goodput=self._goodput.report if self._goodput is not None else None,
            verdict=observer.verdict,
            device_work=observer.device_work,
            collections=observer.collections,
            families=samplers.families,
            permissions=Permissions(clients.callers, self._checked.admin_group),
        )

    def _page(
        self,
        samplers: NodeSamplers,
        control: ControlService,
        clients: _Clients,
        observed: _Observed,
        web_config: WebConfigFile | None,
    ) -> LivePage:
        parts = Parts(
            store=self._store,
            control=control,
            catalog=self._catalog,
            coordinator=self._coordinator,
            node=clients.node.name,
            instance=self._instance,
            fleet=self._peers is not None or self._series is not None,
            families=samplers.families,
            samplers=samplers.samplers,
            gpu_of=samplers.gpu_of,
            watch=clients.sessions.frequent_reports.watch,
        )
        page = LivePage(
            self._settings, parts, observed.page, observed.observer.verdict, lambda: self._ready, web_config
        )
        self._on_capture = page.on_capture
        return page

    async def _serve(
        self, stack: contextlib.AsyncExitStack, control: ControlService, clients: _Clients, observer: Observer
    ) -> health.HealthServicer:
        """Serve training processes and commands; daemons of other nodes, too, if configured."""
        grace = min(1.0, self._settings.drain_seconds)
        checks = health.HealthServicer()
        handovers = CaptureHandovers(self._catalog, clients.sessions.find_sender)
        stack.callback(handovers.close)
        rpc = RpcServer(
            self._settings,
            clients.callers,
            clients.sessions,
            control,
            checks,
            self._health.calls,
            handovers.accept if self._settings.is_service else None,
        )
        stack.push_async_callback(rpc.stop, grace)
        await rpc.start()
        if self._fleet_address is not None:
            service = FleetService(
                self._store,
                clients.sessions,
                self._coordinator,
                self._catalog,
                self._instance,
                clients.node.name,
                observer.verdict,
                observer.device_work,
                self._lifetime.was_asked,
            )
            server, address = await listen_to_fleet(
                self._fleet_address, self._interceptor, service, self._health.calls
            )
            stack.push_async_callback(server.stop, grace)
            log.info("fleet port listens on %s", address)
        return checks

    def _awaits_question(self) -> bool:
        """Return whether the daemon of a job's first rank, on another node, may ask about a run here."""
        return self._fleet_address is not None and any(
            ranks[0].identity.rank > 0 and ranks[0].identity.world_size > len(ranks)
            for ranks in self._store.runs().values()
        )

    def _reload(self, web_config: WebConfigFile | None) -> None:
        """Read the files of credentials and certificates again; an invalid file changes nothing."""
        log.info("SIGHUP: reading credentials and certificates again")
        if web_config is not None:
            web_config.current()
        self._credentials.reload()

    async def _announce(self, checks: health.HealthServicer, *, ready: bool) -> None:
        self._ready = ready
        await announce(checks, ready=ready)
