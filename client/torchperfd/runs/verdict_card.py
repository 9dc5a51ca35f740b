"""The verdict card out of a run's document."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchperfd.card import CauseCard, VerdictCard, unknown_card
from torchperfd.card.contents import HEALTHY, LEAST_SHARE, UNKNOWN
from torchperfd.report import RankReport
from torchperfd.report.validation_waits import validation_waits
from torchperfd.runs.record import RunRecord
from torchperfd.runs.values import count, number, text
from torchperfd.slow_line import SlowLine


def read_card(document: dict[str, Any], record: RunRecord, reports: Sequence[RankReport]) -> VerdictCard:
    """Return the card that the end of the run has shown, as far as its report has it.

    Args:
        document: Of schema ``torchperfd.run/1``.
        record: The same run.
        reports: Those of its ranks.
    """
    if not any(each.table.rows for each in reports):
        return unknown_card(record.run, "no training step was seen: the script has not trained with torch")
    verdict = document.get("verdict")
    if verdict is None:
        return unknown_card(record.run, "no daemon has answered, so nothing compared the steps")
    also = tuple(validation_waits(reports))
    name = text(verdict["cause"])
    if name in (HEALTHY, UNKNOWN) and not verdict.get("cost_seconds_per_step"):
        return VerdictCard(record.run, remark=_why(verdict), is_healthy=name == HEALTHY, also=also)
    first, *others = [_cause(each, record) for each in _causes(verdict)]
    further = (cause for cause in others if cause.share >= LEAST_SHARE)
    return VerdictCard(record.run, (first, *further), also=also)


def _causes(verdict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield verdict
    yield from verdict.get("others") or ()


def _cause(verdict: dict[str, Any], record: RunRecord) -> CauseCard:
    rank = verdict.get("rank")
    # Reports of older versions have neither the node nor the step that the cost is a part of.
    node = text(verdict.get("node"))
    step = number(verdict.get("step_seconds") or 0) or record.step_seconds or 0.0
    return CauseCard(
        cause=text(verdict["cause"]),
        where="" if rank is None else f"rank {count(rank)}" + (f" on {node}" if node else ""),
        why=_why(verdict),
        fix=text(verdict.get("fix")),
        cost_seconds=number(verdict.get("cost_seconds_per_step") or 0),
        step_seconds=step,
        saves_seconds=number(verdict.get("saves_seconds") or 0),
        stalled_seconds=number(verdict.get("stalled_seconds") or 0),
        rank=None if rank is None else count(rank),
        line=_line(verdict.get("line")),
    )


def _why(verdict: dict[str, Any]) -> str:
    window = number(verdict.get("window_seconds") or 0)
    # The summary is what a report without the evidence has.
    why = text(verdict.get("evidence")) or text(verdict.get("summary"))
    return f"{why} (last {window:.0f} s)" if window >= 1 else why


def _line(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    return SlowLine(
        stage=text(line["stage"]),
        stage_share=number(line["stage_share"]),
        file=text(line.get("file")),
        line=count(line.get("line") or 0),
        function=text(line.get("function")),
        call=text(line.get("call")),
        share=number(line.get("share") or 0),
        in_workers=bool(line.get("in_workers")),
        of_step=bool(line.get("of_step")),
    ).words
