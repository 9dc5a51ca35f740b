"""One rank's report: what ``client.report()`` returns."""

from dataclasses import dataclass, field
from typing import Any

# Here, as a signal handler of the script that asks for a report may interrupt another one's first import.
from torchperfd.report import csv, html, markdown, text
from torchperfd.report.document import rank_document
from torchperfd.report.numbers import Table, tabulate
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.step_series import BlockSums
from torchperfd.steps.totals import Totals


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank spent its time on.

    ``print`` it in a terminal; in a notebook, it is a table by itself.

    Attributes:
        rank: Whose report it is.
        totals: The totals it was made of; must not change any more.
        names: What their phases are called.
        dropped: Steps that the recorder had to throw away.
        blocks: Sums of consecutive steps; None before the loop has ended, and where they are unknown.
        table: Every number that is shown.
    """

    rank: int
    totals: Totals
    names: PhaseNames
    dropped: int = 0
    blocks: BlockSums | None = None
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        table = tabulate(self.rank, self.totals, self.names, dropped=self.dropped)
        object.__setattr__(self, "table", table)

    @property
    def account(self) -> Totals:
        """The totals, by the name that they had before; scripts use it."""
        return self.totals

    def to_text(self, width: int | None = None) -> str:
        """Return the phase table for a terminal.

        Args:
            width: Columns that it may take; by default as many as it needs, less than 100.
        """
        return text.render(self.table, width)

    def to_markdown(self) -> str:
        """Return the phase table as GitHub-flavoured Markdown."""
        return markdown.render(self.table)

    def to_html(self) -> str:
        """Return the phase table as HTML that needs nothing else."""
        return html.render(self.table)

    def to_csv(self) -> str:
        """Return the phase table as comma-separated values, in seconds."""
        return csv.render(self.table)

    def to_dict(self) -> dict[str, Any]:
        """Return the rank's part of a ``torchperfd.run/1`` document."""
        return rank_document(self.rank, self.totals, self.names, self.blocks)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()
