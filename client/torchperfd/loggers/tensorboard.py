"""TensorBoard: scalars while training, the table as text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchperfd.loggers.library import library
from torchperfd.loggers.sender import EVERY_SECONDS

if TYPE_CHECKING:
    from torchperfd.card import VerdictCard
    from torchperfd.report import RankReport


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
            self._writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter(self._log_dir)
        return self._writer
