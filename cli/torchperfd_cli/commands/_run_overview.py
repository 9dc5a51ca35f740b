"""One run as it is shown after its end: read from its report, and shown to people or handed to a page."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from torchperfd.document.blocks import Document, Facts
from torchperfd.launch.run_report import ended_card
from torchperfd.model.card import CauseCard, VerdictCard
from torchperfd.model.formatting import MAX_INT, MAX_LARGE, count, duration, number, optional, text
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.messages import fill, from_document, pack
from torchperfd.model.process import HookState
from torchperfd.model.source_lines import InputStages, SlowLine, SyncWait
from torchperfd.model.step_account import Account
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd.report import phase_table
from torchperfd.report.overview import (
    WAIT,
    RankRow,
    account_bars,
    overview,
    phase_shares,
    rank_rows,
    remarks,
    shown_ranks,
)
from torchperfd.report.rank import RankReport
from torchperfd.report.record import RunRecord, read_document, record_of
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import KindTotals, Totals
from torchperfd.v1 import control_pb2


def read_reports(document: dict[str, Any]) -> tuple[RankReport, ...]:
    """Return each rank's report, by rank.

    Args:
        document: Of schema ``torchperfd.run/1``; an older one lacks what its version did not keep.
    """
    found = []
    for each in document["ranks"]:
        names = PhaseNames()
        found.append(RankReport(count(each["rank"]), _totals(each, names), names))
    return tuple(sorted(found, key=lambda report: report.rank))


def _totals(rank: dict[str, Any], names: PhaseNames) -> Totals:
    passes, fit = rank.get("passes") or {}, rank.get("fit")
    stages, memory, cuda = (rank.get(name) for name in ("input_stages", "host_memory", "cuda"))
    totals = Totals(
        train=_kind(rank["train"], names),
        validate=_kind(rank.get("validate"), names),
        warmup=_kind(rank.get("warmup"), names),
        checkpoint=_phase(rank.get("checkpoint")),
        background_saves=_phase(rank.get("background_saves")),
        epoch=_phase(passes.get("epoch")),
        train_pass=_phase(passes.get("train")),
        validate_pass=_phase(passes.get("validate")),
        gc=tuple(from_document(each, GcTotals) for each in rank.get("gc") or ()),
        flops_per_step=optional(rank.get("flops_per_step"), MAX_LARGE),
        peak_flops=optional(rank.get("peak_flops_per_second"), MAX_LARGE),
        overhead=optional(rank.get("overhead_ratio")),
        degradation_level=count(rank.get("shed_tiers") or 0),
        loader=None if stages is None else LoaderFacts(stages=from_document(stages, InputStages)),
        hooks=tuple(from_document(each, HookState) for each in rank.get("hooks") or ()),
        sync_waits=tuple(from_document(each, SyncWait) for each in rank.get("sync_waits") or ()),
        host_memory=None if memory is None else from_document(memory, HostMemory),
        cuda=None if cuda is None else from_document(cuda, CudaMemory),
    )
    if totals.warmup.steps > totals.train.steps or totals.warmup.ns > totals.train.ns:
        raise ValueError("its first step is no part of its steps")
    if fit is not None:
        # Only the distance is kept; a beginning of 0 would mean that it is unknown.
        totals.began_ns, totals.ended_ns = 1, 1 + _ns(fit)
    return totals


def _kind(kind: dict[str, Any] | None, names: PhaseNames) -> KindTotals:
    totals = KindTotals()
    if kind is None:
        return totals
    totals.steps = count(kind["steps"])
    totals.ns = round(1e9 * number(kind["step_seconds_total"]))
    if (deviation := optional(kind.get("step_std_seconds"))) is not None:
        totals.squares = _squares(totals.steps, totals.ns, deviation)
    for name in ("samples", "tokens", "micro_batches", "skipped"):
        setattr(totals, name, count(kind.get(name) or 0, MAX_LARGE))
    for name, phase in (kind.get("phases") or {}).items():
        # Names beyond the limit share a slot.
        slot = names.slot(text(name))
        totals.phases[slot] = totals.phases[slot].plus(_phase(phase))
    return totals


def _phase(phase: dict[str, Any] | None) -> PhaseTotals:
    if phase is None:
        return PhaseTotals()
    calls, ns = count(phase["calls"]), _ns(phase)
    squares = _squares(calls, ns, number(phase.get("std_seconds") or 0))
    device = phase.get("device") or {"seconds_total": 0, "calls": 0}
    return PhaseTotals(calls, ns, squares, _ns(device), count(device["calls"]))


def _squares(calls: int, ns: int, deviation_seconds: float) -> float:
    return calls * ((1e9 * deviation_seconds) ** 2 + (ns / calls) ** 2) if calls else 0.0


def _ns(times: dict[str, Any]) -> int:
    return round(1e9 * number(times["seconds_total"]))


MAX_TABLES: Final = 64
"""Of more ranks only those that stand out have their table on the page."""
_WORD_COLUMNS: Final = 2
_OF_CARD: Final = (
    *("heading", "summary", "is_healthy", "remark", "failure", "remedy"),
    *("also", "note", "outcome", "trace", "next_command"),
)


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run, its ranks' reports and its verdict.

    Attributes:
        record: The run as comparisons see it.
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

    def document(self) -> Document:
        """Return the run for people: its facts, its verdict, its account, and its phases or ranks."""
        environment = ", ".join(f"{name} {value}" for name, value in self.record.environment.items())
        facts = [(name, value) for name, value in (*self.facts, ("on", environment)) if value]
        account = [account_bars(self.card.account)] if self.card.account else []
        phases = overview(self.reports, {}, named=self.named) if self.reports else Document([])
        above = Document([[Facts(facts, column=10, margin=2)]])
        return above + self.card.document() + Document([account]) + phases

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
    """Read a report, as :func:`torchperfd.report.record.read_record` does.

    Raises:
        RunFileError: It is damaged, or something else.
    """

    def read(document: dict[str, Any]) -> RunOverview:
        record, reports = record_of(document), read_reports(document)
        return RunOverview(record, reports, _read_card(document, record, reports))

    return read_document(content, source, read)


def _read_card(document: dict[str, Any], record: RunRecord, reports: Sequence[RankReport]) -> VerdictCard:
    """Return the card that the end of the run has shown, as far as its report has it.

    Args:
        document: Of schema ``torchperfd.run/1``.
    """
    kept, verdict = document.get("verdict"), None
    if kept is not None:
        verdict = _verdict_of(kept, record.run, record.step_seconds or 0.0)
    card = ended_card(record.run, reports, verdict, record.ending)
    return replace(card, outcome=record.outcome.words if record.outcome is not None else "")


def _verdict_of(kept: dict[str, Any], run: str, step_seconds: float) -> control_pb2.Verdict:
    """Return the message that the verdict of a report was kept from, as far as its card needs it.

    Args:
        kept: As ``verdict_to_report`` returns it; reports of older versions lack the node, the evidence, and
            the step that the cost is a part of.
        run: The run's name.
        step_seconds: The run's step, for verdicts without one; 0 if unknown.

    Raises:
        ValueError: It is damaged, as with ``KeyError``, ``TypeError`` and ``AttributeError``.
    """
    verdict = _read_cause(kept, run, step_seconds)
    verdict.remarks.extend(text(each) for each in kept.get("remarks") or ())
    verdict.others.extend(_read_cause(each, run, step_seconds) for each in kept.get("others") or ())
    verdict.note = text(kept.get("note"))
    if kept.get("account") is not None:
        fill(verdict.account, Account.from_document(kept["account"]))
    return verdict


def _read_cause(kept: dict[str, Any], run: str, step_seconds: float) -> control_pb2.Verdict:
    rank, line = kept.get("rank"), kept.get("line")
    return control_pb2.Verdict(
        cause=text(kept["cause"]),
        run=run,
        node=text(kept.get("node")),
        rank=-1 if rank is None else count(rank, MAX_INT),
        evidence=text(kept.get("evidence")) or text(kept.get("summary")),
        cost_seconds_per_step=number(kept.get("cost_seconds_per_step") or 0),
        step_seconds=number(kept.get("step_seconds") or 0) or step_seconds,
        stalled_seconds=number(kept.get("stalled_seconds") or 0),
        window_seconds=number(kept.get("window_seconds") or 0),
        fix=text(kept.get("fix")),
        saves_seconds=number(kept.get("saves_seconds") or 0),
        line=None if line is None else pack(control_pb2.SlowLine, from_document(line, SlowLine, samples=0)),
    )


def _card(card: VerdictCard) -> dict[str, Any]:
    return {
        **{name: getattr(card, name) for name in _OF_CARD},
        "causes": [{"head": _head(cause), "parts": cause.parts} for cause in card.causes],
        "account": card.account_lines,
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
