"""The sender: one thread per logger, between the totals and a tracker that may be slow or broken."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchperfd.faults import Faults
from torchperfd.loggers.measures import measures
from torchperfd.loggers.protocol import Logger
from torchperfd.safety.flag import Flag
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals

if TYPE_CHECKING:
    from torchperfd.card import VerdictCard
    from torchperfd.report import RankReport

EVERY_SECONDS: Final = 10.0
_FIRST_S: Final = 1.0
_LOOK_S: Final = 0.25
SLOW_RANK: Final = "torchperfd/slow_rank"
"""The rank that the verdict names, while it names one."""


class Sender:
    """Calls one logger, every now and then, until it fails too often.

    Args:
        logger: Whom to call.
        place: What its failures are counted under.
        totals: Returns a copy of the current totals.
        steps: Returns how many training steps there are; asked often, so cheap.
        names: Phase names.
        faults: Where failures are counted.
        on_first: Called once, after the logger took its first numbers.
        verdict: Returns the verdict on the run, in a fraction of a second; None while there is none.
    """

    def __init__(
        self,
        logger: Logger,
        place: str,
        *,
        totals: Callable[[], Totals],
        steps: Callable[[], int],
        names: PhaseNames,
        faults: Faults,
        on_first: Callable[[], None] = lambda: None,
        verdict: Callable[[], "VerdictCard | None"] = lambda: None,
    ) -> None:
        self.place = place
        self._logger = logger
        self._totals = totals
        self._steps = steps
        self._names = names
        self._faults = faults
        self._on_first = on_first
        self._verdict = verdict
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
        self._sent = self._totals()
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
                self._faults.note(self.place, TimeoutError("the process ends before the logger has"))

    def _run(self) -> None:
        due = time.monotonic() + min(_FIRST_S, self._every_seconds)
        while not self._off and not self._ending.wait(self._pause(due)):
            if time.monotonic() >= due or self._enough_steps():
                self._send(self._totals())
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
        return 0 < self._every_steps <= self._steps() - self._sent.train.steps

    def _send(self, now: Totals) -> None:
        found = measures(self._sent, now, self._names)
        if not found:
            return
        self._sent = now
        card = self._verdict() if now.train.steps else None
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
            self._faults.note(self.place, error)
            # What is not installed will not be there the next time either.
            self._off = isinstance(error, ImportError) or self._faults.spent(self.place)
            return False
        return True
