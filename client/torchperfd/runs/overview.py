"""One run as it is shown after its end: computed once, then laid out as text or handed to a page."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.model.card import CauseCard, VerdictCard
from torchperfd.model.formatting import duration
from torchperfd.report import RankReport, phase_table
from torchperfd.report.overview import (
    WAIT,
    RankRow,
    account_table,
    phase_shares,
    rank_rows,
    remarks,
    render_overview,
    shown_ranks,
)
from torchperfd.runs.rank_reports import read_reports
from torchperfd.runs.record import RunRecord, read_document, record_of
from torchperfd.runs.verdict_card import read_card

MAX_TABLES: Final = 64
"""Of more ranks only those that stand out have their table on the page."""
_WORD_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run, its ranks' reports and its verdict.

    Attributes:
        record: The run as comparisons see it.
        reports: By rank.
        card: The verdict.
    """

    record: RunRecord
    reports: tuple[RankReport, ...]
    card: VerdictCard

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What was run, where and when, as a name and its words each."""
        run = self.record
        when = ""
        if run.started is not None and run.ended is not None:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
            when = f"{began}, for {duration(max(0.0, run.ended - run.started))}"
        facts = [
            ("run", run.run),
            ("script", run.script),
            ("host", run.host),
            ("when", when),
            ("ranks", str(run.world_size)),
            ("ended", run.ending.words),
            ("change", run.outcome.details if run.outcome is not None else ""),
        ]
        return [(name, value) for name, value in facts if value]

    @property
    def named(self) -> list[int]:
        """The ranks that the verdict blames."""
        return [cause.rank for cause in self.card.causes if cause.rank is not None]

    def to_text(self, *, colour: bool = False, width: int = 80, fold: Callable[[str], str] = str) -> str:
        """Return the run for a terminal, without a last newline.

        Args:
            fold: Folds the lines of facts, which are as long as the names in them.
        """
        environment = ", ".join(f"{name} {value}" for name, value in self.record.environment.items())
        facts = [*self.facts, ("on", environment)]
        account = self.card.account
        parts = [
            fold("\n".join(f"{name:8}  {value}" for name, value in facts if value)),
            self.card.to_text(colour=colour, width=width),
            account_table(account, colour=colour, width=width) if account else "",
            render_overview(self.reports, {}, named=self.named, colour=colour, width=width)
            if self.reports
            else "",
        ]
        return "\n\n".join(part for part in parts if part)

    def to_page(self) -> dict[str, Any]:
        """Return what the page of a run shows: JSON, with texts as they are to be read."""
        rows = rank_rows(self.reports)
        first = next((each for each in self.reports if each.totals.train.steps), None)
        leading = self._leading(rows)
        shown = {row.rank for row in shown_ranks(rows, self.named)}
        tables = [each for each in self.reports if len(self.reports) <= MAX_TABLES or each.rank in shown]
        tables.sort(key=lambda each: (each is not leading, each.rank))
        return {
            "card": _card(self.card),
            "account": self.card.account_rows,
            "facts": self.facts,
            "environment": list(self.record.environment.items()),
            "rank": leading.rank if leading and len(self.reports) > 1 else None,
            "headline": phase_table.headline(first.table, None) if first else "",
            "phases": [asdict(each) for each in phase_shares(leading, {})] if leading else [],
            "remarks": list(remarks(first)) if first else [],
            "ranks": [_rank(row, is_named=row.rank in self.named) for row in rows],
            "wait": WAIT,
            "tables": [_table(each) for each in tables],
            "tables_left_out": len(self.reports) - len(tables),
        }

    def _leading(self, rows: Sequence[RankRow]) -> RankReport | None:
        """Return the rank that the page begins with: a named one, else the one with most own work."""
        first = max(rows, key=lambda row: (row.rank in self.named, row.own_seconds), default=None)
        return next((each for each in self.reports if first and each.rank == first.rank), None)


def read_overview(content: bytes, source: str) -> RunOverview:
    """Read a report, as :func:`torchperfd.runs.record.read_record` does.

    Raises:
        RunFileError: It is damaged, or something else.
    """

    def read(document: dict[str, Any]) -> RunOverview:
        record, reports = record_of(document), read_reports(document)
        return RunOverview(record, reports, read_card(document, record, reports))

    return read_document(content, source, read)


def _card(card: VerdictCard) -> dict[str, Any]:
    return {
        "heading": card.heading,
        "summary": card.summary,
        "is_healthy": card.is_healthy,
        "remark": card.remark,
        "failure": card.failure,
        "remedy": card.remedy,
        "causes": [{"head": _head(cause), "parts": cause.parts} for cause in card.causes],
        "also": card.also,
        "note": card.note,
        "account": card.account_lines,
        "outcome": card.outcome,
        "trace": card.trace,
        "next_command": card.next_command,
    }


def _head(cause: CauseCard) -> str:
    return " · ".join(part for part in (cause.cause, cause.where, cause.cost) if part)


def _rank(row: RankRow, *, is_named: bool) -> dict[str, Any]:
    return {**asdict(row), "own_seconds": row.own_seconds, "is_named": is_named}


def _table(report: RankReport) -> dict[str, Any]:
    table = report.table
    rows = zip(table.rows, phase_table.cells(table), strict=True)
    return {
        "rank": report.rank,
        "title": phase_table.title(table),
        "headings": phase_table.headings(table),
        "word_columns": _WORD_COLUMNS,
        "rows": [{"cells": cells, "share": row.share} for row, cells in rows],
        "facts": phase_table.facts(table),
        "notes": table.notes,
    }
