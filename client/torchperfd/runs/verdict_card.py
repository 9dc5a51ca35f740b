"""The verdict card out of a run's document."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torchperfd.model.card import VerdictCard, card_of, unknown_card
from torchperfd.report import RankReport
from torchperfd.report.overview import validation_waits
from torchperfd.runs.ending import Ending, failure_remedy
from torchperfd.runs.record import RunRecord
from torchperfd.runs.values import count, number, text
from torchperfd.v1 import control_pb2

_MAX_INT: Final = 2**31 - 1


def read_card(document: dict[str, Any], record: RunRecord, reports: Sequence[RankReport]) -> VerdictCard:
    """Return the card that the end of the run has shown, as far as its report has it.

    Args:
        document: Of schema ``torchperfd.run/1``.
        record: The same run.
        reports: Those of its ranks.
    """
    kept, verdict = document.get("verdict"), None
    if kept is not None:
        verdict = _read_verdict(kept, record)
        verdict.remarks.extend(text(each) for each in kept.get("remarks") or ())
        verdict.others.extend(_read_verdict(each, record) for each in kept.get("others") or ())
        verdict.note = text(kept.get("note"))
        if record.account is not None:
            record.account.fill_message(verdict.account)
    card = ended_card(record.run, reports, verdict, record.ending)
    return replace(card, outcome=record.outcome.words if record.outcome is not None else "")


def ended_card(
    run: str,
    reports: Sequence[RankReport],
    verdict: control_pb2.Verdict | None,
    ending: Ending,
    advice: str = "",
) -> VerdictCard:
    """Return the card of a run that has ended. A failure comes first, whatever was seen before it.

    Args:
        reports: Those of its ranks.
        verdict: None if no daemon has answered.
        advice: What to do where training was seen but no step of it; empty if unknown.
    """
    failure, also = ending.failure, tuple(validation_waits(reports))
    remedy = failure_remedy(failure)
    if not any(each.totals.train.steps for each in reports):
        why = ending.why_untrained(advice)
        if failure:
            return VerdictCard(run, failure=why, remedy=remedy)
        return replace(unknown_card(run, why), also=also)
    if verdict is None:
        card = unknown_card(run, "no daemon has answered, so nothing compared the steps")
    else:
        card = card_of(verdict)
    if failure and remedy:
        # Such as a dead worker, for which the loop has waited: what the steps lost comes from it. Memory that
        # grew may be why.
        beside = tuple(cause for cause in card.causes if not cause.cost_seconds)
        return VerdictCard(run, beside, failure=failure, remedy=remedy)
    return replace(card, also=(*card.also, *also), failure=failure)


def _read_verdict(kept: dict[str, Any], record: RunRecord) -> control_pb2.Verdict:
    """Return the message that a verdict was kept from.

    Reports of older versions lack the node, the evidence, and the step that the cost is a part of.
    """
    rank, line = kept.get("rank"), kept.get("line")
    return control_pb2.Verdict(
        cause=text(kept["cause"]),
        run=record.run,
        node=text(kept.get("node")),
        rank=-1 if rank is None else count(rank, _MAX_INT),
        evidence=text(kept.get("evidence")) or text(kept.get("summary")),
        cost_seconds_per_step=number(kept.get("cost_seconds_per_step") or 0),
        step_seconds=number(kept.get("step_seconds") or 0) or record.step_seconds or 0.0,
        stalled_seconds=number(kept.get("stalled_seconds") or 0),
        window_seconds=number(kept.get("window_seconds") or 0),
        fix=text(kept.get("fix")),
        saves_seconds=number(kept.get("saves_seconds") or 0),
        line=None if line is None else _read_line(line),
    )


def _read_line(line: dict[str, Any]) -> control_pb2.SlowLine:
    return control_pb2.SlowLine(
        stage=text(line["stage"]),
        stage_share=number(line["stage_share"]),
        file=text(line.get("file")),
        line=count(line.get("line") or 0, _MAX_INT),
        function=text(line.get("function")),
        call=text(line.get("call")),
        share=number(line.get("share") or 0),
        in_workers=bool(line.get("in_workers")),
        of_step=bool(line.get("of_step")),
        caller=text(line.get("caller")),
    )
