"""What a logger is."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchperfd.report import RankReport


class Logger(Protocol):
    """Takes numbers while training goes on, and the table at its end.

    All three methods are called on one thread, never on the training thread. Exceptions are
    counted, and a logger that raises too often is not called again. Optional attributes set
    how often it is called: ``every_seconds`` (10 by default), ``every_steps`` (also after so many
    training steps; by default never). An optional method ``log_verdict(card, step)`` takes the verdict on the
    run, a :class:`~torchperfd.card.VerdictCard`, each time when another cause or rank is found.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the means since the last call; ``step`` training steps have ended so far."""

    def log_table(self, report: "RankReport") -> None:
        """Take the report of the whole fit; called once, at its end."""

    def close(self) -> None:
        """Write out what is left; called last."""
