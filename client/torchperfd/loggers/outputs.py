"""The outputs of one rank besides the daemon: loggers, and a metrics page of its own.

A logger has one thread, between the totals and a tracker that may be slow or broken. It gets the means of the
steps between two readings of the totals. A tracker makes one section of each part in front of a slash, and
sorts by name: what people look at first is in ``torchperfd/``, and the phases, validation and memory have one
section each.

The page is for those who have no daemon. It is opt-in, on loopback, and small.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchperfd.model.identity import Identity
from torchperfd.safety.interrupts import Flag
from torchperfd.safety.logs import Faults, log
from torchperfd.steps.phases import COLLECTIVE_WAIT, DATA, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

if TYPE_CHECKING:
    from torchperfd.model.card import VerdictCard
    from torchperfd.model.fields import Field
    from torchperfd.report.rank import RankReport

_LABELS: Final = ("run", "rank")


class Exporter:
    """Serves one rank's totals on ``http://127.0.0.1:<port>/metrics``.

    Args:
        port: 0 for any free one.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, port: int, *, run: str, rank: int, names: PhaseNames, totals: Callable[[], Totals]
    ) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = [run, str(rank)]
        self._names = names
        self._totals = totals
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port: int = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """Yield the metric families, as prometheus_client asks for them."""
        from torchperfd.model import fields

        totals = self._totals()
        train = totals.train
        yield self._family(fields.STEPS, train.steps)
        yield self._family(fields.STEP_SECONDS, train.ns / 1e9)
        yield self._phases(train)
        if train.samples:
            yield self._family(fields.SAMPLES, train.samples)
        if train.tokens:
            yield self._family(fields.TOKENS, train.tokens)
        utilization = totals.flops_utilization(train)
        if utilization is not None:
            yield self._family(fields.FLOPS_UTILIZATION, utilization)
        if totals.overhead is not None:
            yield self._family(fields.OVERHEAD, totals.overhead)

    def _phases(self, train: KindTotals) -> Any:
        from prometheus_client.core import CounterMetricFamily

        phases = CounterMetricFamily(
            "torchperfd_train_phase_seconds", "Exclusive host time by phase.", labels=(*_LABELS, "phase")
        )
        for slot in range(len(self._names)):
            if train.phases[slot].calls:
                phases.add_metric([*self._labels, self._names.name(slot)], train.phases[slot].seconds)
        return phases

    def _family(self, field: "Field", value: float) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if field.kind == "counter" else GaugeMetricFamily
        family = kind(f"torchperfd_{field.metric}", field.help, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def close(self) -> threading.Thread:
        """Stop serving; return a thread that ends when that is done, which takes up to half a second."""
        closing = threading.Thread(target=self._close, name="torchperfd-exporter", daemon=True)
        closing.start()
        return closing

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Logger(Protocol):
    """Takes numbers while training goes on, and the table at its end.

    All three methods are called on one thread, never on the training thread. Exceptions are
    counted, and a logger that raises too often is not called again. Optional attributes set
    how often it is called: ``every_seconds`` (10 by default), ``every_steps`` (also after so many
    training steps; by default never). An optional method ``log_verdict(card, step)`` takes the verdict on the
    run, a :class:`~torchperfd.model.card.VerdictCard`, each time when another cause or rank is found.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the means since the last call; ``step`` training steps have ended so far."""

    def log_table(self, report: "RankReport") -> None:
        """Take the report of the whole fit; called once, at its end."""

    def close(self) -> None:
        """Write out what is left; called last."""


FIRST_SECTION: Final = "torchperfd"
PHASES_SECTION: Final = "torchperfd_phases"
VALIDATION_SECTION: Final = "torchperfd_validation"
MEMORY_SECTION: Final = "torchperfd_memory"
SECTIONS: Final = (FIRST_SECTION, PHASES_SECTION, VALIDATION_SECTION, MEMORY_SECTION)


def measures(before: Totals, now: Totals, names: PhaseNames) -> dict[str, float]:
    """Return the numbers by name; none while no step has ended in between.

    The first training step is in none of them. Shares are parts of the step, so that a step's phases sum
    to 1. Memory is as of now.
    """
    train = now.train.minus(before.train if before.train.steps else now.warmup)
    validate = now.validate.minus(before.validate)
    found = {
        **_kind(FIRST_SECTION, PHASES_SECTION, train, names),
        **_kind(VALIDATION_SECTION, VALIDATION_SECTION, validate, names),
    }
    if found:
        found.update(_beside(before, now, train))
    return found


def _kind(section: str, phases: str, steps: KindTotals, names: PhaseNames) -> dict[str, float]:
    if steps.steps <= 0:
        return {}
    found = {f"{section}/step_ms": steps.mean_seconds * 1e3}
    for counted, count in (("samples", steps.samples), ("tokens", steps.tokens)):
        if count and steps.ns:
            found[f"{section}/{counted}_per_second"] = count / (steps.ns / 1e9)
    for slot in range(len(names)):
        phase = steps.phases[slot]
        if phase.calls and steps.ns:
            # A slash would be one more level, and some trackers keep levels as directories.
            name = names.name(slot).replace("/", "_")
            found[f"{phases}/{name}_share"] = phase.ns / steps.ns
    return found


def _beside(before: Totals, now: Totals, train: KindTotals) -> dict[str, float]:
    found: dict[str, float] = {}
    elapsed_ns = now.ended_ns - (before.ended_ns or now.began_ns)
    if train.steps > 0 and now.ended_ns and elapsed_ns >= train.ns:
        waits_ns = train.phases[DATA].ns + train.phases[COLLECTIVE_WAIT].ns
        found[f"{FIRST_SECTION}/goodput"] = (train.ns - waits_ns) / elapsed_ns
    utilization = now.flops_utilization(train)
    if utilization is not None:
        found[f"{FIRST_SECTION}/mfu"] = utilization
    if now.cuda is not None:
        found[f"{MEMORY_SECTION}/allocated_bytes"] = now.cuda.allocated_bytes
        found[f"{MEMORY_SECTION}/reserved_bytes"] = now.cuda.reserved_bytes
        found[f"{MEMORY_SECTION}/peak_bytes"] = now.cuda.peak_bytes
    if now.overhead is not None:
        found[f"{FIRST_SECTION}/overhead_ratio"] = now.overhead
    return found


EVERY_SECONDS: Final = 10.0
_FIRST_S: Final = 1.0
_LOOK_S: Final = 0.25
SLOW_RANK: Final = "torchperfd/slow_rank"
"""The rank that the verdict names, while it names one."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What loggers read of this rank.

    Attributes:
        totals: Returns a copy of the current totals.
        steps: Returns how many training steps there are; asked often, so cheap.
        verdict: Returns the verdict on the run, in a fraction of a second; None while there is none.
    """

    names: PhaseNames
    faults: Faults
    totals: Callable[[], Totals]
    steps: Callable[[], int]
    verdict: Callable[[], "VerdictCard | None"]


class Sender:
    """Calls one logger, every now and then, until it fails too often.

    Args:
        place: What its failures are counted under.
        on_first: Called once, after the logger took its first numbers.
    """

    def __init__(
        self,
        logger: Logger,
        place: str,
        readings: Readings,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        self._logger = logger
        self._readings = readings
        self._on_first = on_first
        self._logged_verdict = ""
        self._every_seconds = float(getattr(logger, "every_seconds", EVERY_SECONDS))
        self._every_steps = int(getattr(logger, "every_steps", 0))
        self._sent = Totals()
        self._report: RankReport | None = None
        self._ending = Flag()
        self._off = False
        self._thread = threading.Thread(target=self._run, name="torchperfd-logger", daemon=True)

    def start(self) -> None:
        """Begin with what has been trained from here on."""
        self._sent = self._readings.totals()
        self._thread.start()

    def conclude(self, report: "RankReport") -> None:
        """Ask for the last numbers, the table and the end; returns at once."""
        if not self._ending.is_set():
            self._report = report
            self._ending.set()

    def join(self, timeout: float) -> None:
        """Wait for the end; a logger that takes longer is left behind and counted."""
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._readings.faults.note(self.place, TimeoutError("the process ends before the logger has"))

    def _run(self) -> None:
        due = time.monotonic() + min(_FIRST_S, self._every_seconds)
        while not self._off and not self._ending.wait(self._pause(due)):
            if time.monotonic() >= due or self._enough_steps():
                self._send(self._readings.totals())
                due = time.monotonic() + self._every_seconds
        if self._report is not None and not self._off:
            report = self._report
            self._send(report.totals)
            if not self._off:
                self._try(lambda: self._logger.log_table(report))
        self._try(lambda: self._logger.close())

    def _pause(self, due: float) -> float:
        pause = max(0.01, due - time.monotonic())
        return min(pause, _LOOK_S if self._every_steps > 0 else 60.0)

    def _enough_steps(self) -> bool:
        return 0 < self._every_steps <= self._readings.steps() - self._sent.train.steps

    def _send(self, now: Totals) -> None:
        found = measures(self._sent, now, self._readings.names)
        if not found:
            return
        self._sent = now
        card = self._readings.verdict() if now.train.steps else None
        slow = [cause.rank for cause in card.causes if cause.rank is not None] if card is not None else []
        if slow and slow[0] is not None:
            found[SLOW_RANK] = slow[0]
        if self._try(lambda: self._logger.log_metrics(found, now.train.steps)):
            self._on_first()
            self._on_first = lambda: None
        if card is not None and not self._off:
            self._send_verdict(card, now.train.steps)

    def _send_verdict(self, card: "VerdictCard", step: int) -> None:
        """Send a verdict that differs from the last one in more than its figures."""
        key = f"{card.is_healthy} {[(cause.cause, cause.where) for cause in card.causes]}"
        log_verdict = getattr(self._logger, "log_verdict", None)
        if log_verdict is not None and key != self._logged_verdict:
            self._logged_verdict = key
            # A tracker shows it long after the run.
            self._try(lambda: log_verdict(card.after_run(), step))

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - other people's code, and training goes on
            self._readings.faults.note(self.place, error)
            # What is not installed will not be there the next time either.
            self._off = isinstance(error, ImportError) or self._readings.faults.spent(self.place)
            return False
        return True


class Outputs:
    """Starts and ends them.

    Attributes:
        exporter: The metrics page, if one is served.
        senders: One per logger.
    """

    def __init__(self, identity: Identity, readings: Readings) -> None:
        self._identity = identity
        self._readings = readings
        self._closing: threading.Thread | None = None
        self.exporter: Exporter | None = None
        self.senders: list[Sender] = []

    def add(self, logger: "Logger", on_first: Callable[[], None]) -> None:
        """Send a logger what is measured from here on; ``on_first`` is called after its first numbers."""
        name = f"logger {type(logger).__name__}"
        taken = {sender.place for sender in self.senders}
        place = name if name not in taken else f"{name} {len(taken) + 1}"
        sender = Sender(logger, place, self._readings, on_first)
        self.senders.append(sender)
        sender.start()

    def serve(self, port: int, totals: Callable[[], Totals]) -> None:
        """Serve the metrics page on a loopback port, unless it is served already; a taken port is logged."""
        if self.exporter is not None:
            return
        run, rank = self._identity.run, self._identity.rank
        try:
            names = self._readings.names
            self.exporter = Exporter(port, run=run, rank=rank, names=names, totals=totals)
        except OSError as error:
            log.warning("cannot serve metrics on port %d: %s; choose another metrics_port", port, error)

    def conclude(self, report: Callable[[], "RankReport"]) -> None:
        """Ask every logger for its last numbers, the table and the end; returns at once."""
        if self.senders:
            last = report()
            for sender in self.senders:
                sender.conclude(last)

    def close(self) -> None:
        """Begin to close the metrics page; returns at once."""
        exporter, self.exporter = self.exporter, None
        if exporter is not None:
            self._closing = exporter.close()

    def join(self, deadline: float) -> None:
        """Wait for all ends, until about ``deadline`` on the monotonic clock."""
        if self._closing is not None:
            self._closing.join(max(0.1, deadline - time.monotonic()))
        for sender in self.senders:
            sender.join(max(0.05, deadline - time.monotonic()))
