"""Weights & Biases: charts in the script's own run, and the table beside them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchperfd.loggers.library import library
from torchperfd.loggers.measures import SECTIONS
from torchperfd.loggers.sender import EVERY_SECONDS
from torchperfd.safety.logs import log

if TYPE_CHECKING:
    from torchperfd.card import VerdictCard
    from torchperfd.report import RankReport


_STEP = "torchperfd/step"


class WandbLogger:
    """Logs to a run that the script has begun; begins and finishes none.

    What is logged joins the script's next ``run.log(...)``, whatever steps it counts by: a row of
    our own would advance the run's step, and W&B drops rows whose step has passed. Between two
    such calls the newest numbers win; a script that never logs anything passes ``commit=True``.

    Args:
        run: What ``wandb.init()`` returned; by default, the run that is active.
        commit: Whether each call is a row of its own.
        every_seconds: How often to log.
        every_steps: Also after so many training steps.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        commit: bool = False,
        every_seconds: float = EVERY_SECONDS,
        every_steps: int = 0,
    ) -> None:
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._commit = commit
        self._run = run
        self._defined = False
        self._step = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Chart the numbers over torchperfd's own count of steps."""
        self._step = step
        run = self._active()
        if run is not None:
            run.log({**metrics, _STEP: step}, commit=self._commit)

    def log_table(self, report: "RankReport") -> None:
        """Log the table as people read it, and as numbers."""
        from torchperfd.report.csv import COLUMNS
        from torchperfd.report.words import cells, headings

        run = self._active()
        if run is None:
            log.warning("no W&B run is active, so nothing was logged: wandb.init() or WandbLogger(run)")
            return
        wandb = library("wandb", "wandb")
        table = report.table
        words = wandb.Table(columns=list(headings(table)), data=[list(row) for row in cells(table)])
        numbers = wandb.Table(
            columns=list(COLUMNS), data=[[getattr(row, column) for column in COLUMNS] for row in table.rows]
        )
        run.log(
            {"torchperfd/report": words, "torchperfd/report_numbers": numbers, _STEP: self._step},
            commit=self._commit,
        )

    def log_verdict(self, card: "VerdictCard", step: int) -> None:
        """Write the verdict into the run's summary, where it is a column of the table of runs."""
        run = self._active()
        if run is not None:
            run.summary["torchperfd/verdict"] = card.summary

    def close(self) -> None:
        """Nothing: the run is the script's to finish."""

    def _active(self) -> Any:
        if self._run is None:
            self._run = library("wandb", "wandb").run
        if self._run is not None and not self._defined:
            self._defined = True
            self._run.define_metric(_STEP, hidden=True)
            for section in SECTIONS:
                self._run.define_metric(f"{section}/*", step_metric=_STEP)
        return self._run
