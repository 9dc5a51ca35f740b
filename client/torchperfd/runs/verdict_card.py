"""The verdict card out of a run's document."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchperfd.model.card import VerdictCard, card_of, unknown_card
from torchperfd.model.verdict_document import verdict_from_report
from torchperfd.report import RankReport
from torchperfd.report.overview import validation_waits
from torchperfd.runs.ending import Ending, failure_remedy
from torchperfd.runs.record import RunRecord
from torchperfd.v1 import control_pb2


def read_card(document: dict[str, Any], record: RunRecord, reports: Sequence[RankReport]) -> VerdictCard:
    """Return the card that the end of the run has shown, as far as its report has it.

    Args:
        document: Of schema ``torchperfd.run/1``.
        record: The same run.
        reports: Those of its ranks.
    """
    kept, verdict = document.get("verdict"), None
    if kept is not None:
        verdict = verdict_from_report(kept, record.run, record.step_seconds or 0.0)
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
