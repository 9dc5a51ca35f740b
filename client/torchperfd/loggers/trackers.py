"""Loggers for experiment trackers: TensorBoard, Weights & Biases and MLflow.

Each imports its library when it first has something to log.
"""

import re
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchperfd.loggers.outputs import EVERY_SECONDS, SECTIONS
from torchperfd.safety.logs import log

if TYPE_CHECKING:
    from torchperfd.model.card import VerdictCard
    from torchperfd.report.rank import RankReport


def import_optional(name: str, package: str) -> Any:
    """Return a module that is not a dependency of ours.

    Args:
        package: What pip calls its distribution.

    Raises:
        ImportError: It is not installed; the message has the command that installs it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; pip install {package}") from error


class TensorBoardLogger:
    """Writes TensorBoard's event files.

    Args:
        log_dir: Where; by default, where ``SummaryWriter()`` would.
        writer: The script's own ``SummaryWriter`` instead, which stays open.
        every_seconds: How often to log.
        every_steps: Also after so many training steps.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        *,
        writer: Any = None,
        every_seconds: float = EVERY_SECONDS,
        every_steps: int = 0,
    ) -> None:
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._log_dir = log_dir
        self._writer = writer
        self._owns = writer is None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a scalar each."""
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_table(self, report: "RankReport") -> None:
        """Add the table to the text tab."""
        self._open().add_text("torchperfd/report", report.to_markdown(), report.table.steps)

    def log_verdict(self, card: "VerdictCard", step: int) -> None:
        """Add the card to the text tab."""
        lines = "\n".join(f"    {line}" for line in card.to_text().splitlines())
        self._open().add_text("torchperfd/verdict", lines, step)

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            self._writer.close() if self._owns else self._writer.flush()

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter(
                self._log_dir
            )
        return self._writer


_WANDB_STEP = "torchperfd/step"


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
            run.log({**metrics, _WANDB_STEP: step}, commit=self._commit)

    def log_table(self, report: "RankReport") -> None:
        """Log the table as people read it, and as numbers."""
        from torchperfd.report.numbers import CSV_COLUMNS
        from torchperfd.report.rank import load_layouts

        load_layouts()
        from torchperfd.report.phase_table import cells, headings

        run = self._active()
        if run is None:
            log.warning("no W&B run is active, so nothing was logged: wandb.init() or WandbLogger(run)")
            return
        wandb = import_optional("wandb", "wandb")
        table = report.table
        words = wandb.Table(columns=list(headings(table)), data=[list(row) for row in cells(table)])
        numbers = wandb.Table(
            columns=list(CSV_COLUMNS),
            data=[[getattr(row, column) for column in CSV_COLUMNS] for row in table.rows],
        )
        run.log(
            {"torchperfd/report": words, "torchperfd/report_numbers": numbers, _WANDB_STEP: self._step},
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
            self._run = import_optional("wandb", "wandb").run
        if self._run is not None and not self._defined:
            self._defined = True
            self._run.define_metric(_WANDB_STEP, hidden=True)
            for section in SECTIONS:
                self._run.define_metric(f"{section}/*", step_metric=_WANDB_STEP)
        return self._run


_REFUSED_BY_MLFLOW = re.compile(r"[^A-Za-z0-9_\-. /]")


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
        metric = import_optional("mlflow.entities", "mlflow-skinny").Metric
        now = int(time.time() * 1000)
        batch = [metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
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
            self._client = import_optional("mlflow", "mlflow-skinny").MlflowClient()
        return self._client


def _active_run_id() -> str | None:
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    return run.info.run_id if run is not None else None


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes: few characters, and no path that leads elsewhere."""
    parts = _REFUSED_BY_MLFLOW.sub("_", name).split("/")
    return "/".join(part if part.strip(". ") else "_" for part in parts)
