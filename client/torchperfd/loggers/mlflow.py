"""MLflow: metrics of the script's own run, and the table among its artifacts."""

import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchperfd.loggers.library import library
from torchperfd.loggers.sender import EVERY_SECONDS
from torchperfd.safety.logs import log

if TYPE_CHECKING:
    from torchperfd.card import VerdictCard
    from torchperfd.report import RankReport


_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /]")


class MLflowLogger:
    """Logs to a run that the script has started; starts and ends none.

    An active run is known only to the thread that started it: make this object there, after
    ``mlflow.start_run()``, or pass the run's id.

    Args:
        run_id: The run; by default, the one that is active here and now.
        every_seconds: How often to log.
        every_steps: Also after so many training steps.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        every_seconds: float = EVERY_SECONDS,
        every_steps: int = 0,
    ) -> None:
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._run_id = run_id or _active_run_id()
        self._client: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all of them in one request."""
        if self._run_id is None:
            return
        metric = library("mlflow.entities", "mlflow-skinny").Metric
        now = int(time.time() * 1000)
        batch = [metric(_name(name), value, now, step) for name, value in metrics.items()]
        self._open().log_batch(self._run_id, metrics=batch)

    def log_table(self, report: "RankReport") -> None:
        """Store the table as Markdown, HTML and CSV."""
        if self._run_id is None:
            log.warning("no MLflow run is known, so nothing was logged: MLflowLogger(run_id)")
            return
        client = self._open()
        client.log_text(self._run_id, report.to_markdown(), "torchperfd/report.md")
        client.log_text(self._run_id, report.to_html(), "torchperfd/report.html")
        client.log_text(self._run_id, report.to_csv(), "torchperfd/report.csv")

    def log_verdict(self, card: "VerdictCard", step: int) -> None:
        """Tag the run with the verdict, and store the card among its artifacts."""
        if self._run_id is not None:
            client = self._open()
            client.set_tag(self._run_id, "torchperfd.verdict", card.summary)
            client.log_text(self._run_id, card.to_text(), "torchperfd/verdict.txt")

    def close(self) -> None:
        """Nothing: the run is the script's to end."""

    def _open(self) -> Any:
        if self._client is None:
            self._client = library("mlflow", "mlflow-skinny").MlflowClient()
        return self._client


def _active_run_id() -> str | None:
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    return run.info.run_id if run is not None else None


def _name(name: str) -> str:
    """Return a name that MLflow takes: few characters, and no path that leads elsewhere."""
    parts = _REFUSED.sub("_", name).split("/")
    return "/".join(part if part.strip(". ") else "_" for part in parts)
