"""The outputs of one rank besides the daemon: loggers, and a metrics page of its own."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchperfd.faults import Faults
from torchperfd.identity import Identity
from torchperfd.safety.logs import log
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals

if TYPE_CHECKING:
    from torchperfd.card import VerdictCard
    from torchperfd.loggers.exporter import Exporter
    from torchperfd.loggers.protocol import Logger
    from torchperfd.loggers.sender import Sender
    from torchperfd.report import RankReport


class Outputs:
    """Starts and ends them.

    Args:
        identity: The rank's.
        names: Phase names.
        faults: Where failures are counted.
        snapshot: Returns a copy of the current totals.
        steps: Returns how many training steps there are; cheap.
        verdict: Returns the verdict on the run, in a fraction of a second; None while there is none.

    Attributes:
        exporter: The metrics page, if one is served.
        senders: One per logger.
    """

    def __init__(
        self,
        identity: Identity,
        names: PhaseNames,
        faults: Faults,
        snapshot: Callable[[], Totals],
        steps: Callable[[], int],
        verdict: Callable[[], "VerdictCard | None"] = lambda: None,
    ) -> None:
        self._identity = identity
        self._names = names
        self._faults = faults
        self._snapshot = snapshot
        self._steps = steps
        self._verdict = verdict
        self._closing: threading.Thread | None = None
        self.exporter: Exporter | None = None
        self.senders: list[Sender] = []

    def add(self, logger: "Logger", on_first: Callable[[], None]) -> None:
        """Send a logger what is measured from here on; ``on_first`` is called after its first numbers."""
        from torchperfd.loggers.sender import Sender

        name = f"logger {type(logger).__name__}"
        taken = {sender.place for sender in self.senders}
        sender = Sender(
            logger,
            name if name not in taken else f"{name} {len(taken) + 1}",
            totals=self._snapshot,
            steps=self._steps,
            names=self._names,
            faults=self._faults,
            on_first=on_first,
            verdict=self._verdict,
        )
        self.senders.append(sender)
        sender.start()

    def serve(self, port: int, totals: Callable[[], Totals]) -> None:
        """Serve the metrics page on a loopback port, unless it is served already; a taken port is logged."""
        if self.exporter is not None:
            return
        from torchperfd.loggers.exporter import Exporter

        run, rank = self._identity.run, self._identity.rank
        try:
            self.exporter = Exporter(port, run=run, rank=rank, names=self._names, totals=totals)
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
