"""The end of ``torchperfd run`` on the terminal: the verdict card and the overview; the rest if asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchperfd.card import VerdictCard
from torchperfd.report import RankReport
from torchperfd.report.overview import Percentiles
from torchperfd.report.overview_text import account_table, render
from torchperfd.runs.ending import Ending
from torchperfd.runs.verdict_card import ended_card

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Closing:
    """What the end of a run shows.

    Attributes:
        run: Its name.
        reports: Those of its ranks, by rank.
        card: The verdict.
        percentiles: Those of the first rank; empty if unknown.
        facts: Further lines, as a name and a value each, such as the path of the report.
    """

    run: str
    reports: Sequence[RankReport]
    card: VerdictCard
    percentiles: Percentiles
    facts: Sequence[tuple[str, str]] = ()


def closing_card(
    run: str,
    reports: Sequence[RankReport],
    answer: "control_pb2.GetRunResponse | None",
    *,
    ending: Ending | None = None,
    advice: str = "",
    capture_id: str = "",
    trace: str = "",
    outcome: str = "",
) -> VerdictCard:
    """Return the card for the end of a run. Its command works although the run has ended.

    Args:
        answer: What the daemon knows of the run; None if no daemon has answered.
        ending: How its script has ended; None if unknown.
        advice: What to do where training was seen but no step of it; empty if unknown.
        capture_id: The newest capture of the run; empty without one.
        trace: What is known of that capture; empty if the run has not made it by itself.
        outcome: What the run has made of the promise of an earlier one; empty without one.
    """
    command = f"torchperfd analyze {capture_id}" if capture_id else ""
    verdict = answer.verdict if answer is not None and answer.HasField("verdict") else None
    card = ended_card(run, reports, verdict, ending or Ending(), advice).after_run()
    if not any(each.totals.train.steps for each in reports):
        return card
    return replace(card, next_command=command or card.next_command, trace=trace, outcome=outcome)


def percentiles_of(answer: "control_pb2.GetRunResponse | None", rank: int) -> Percentiles:
    """Return a rank's percentiles as the daemon knows them; empty if it does not."""
    for each in answer.ranks if answer is not None else ():
        if each.identity.rank == rank:
            return {found.phase: (found.p50_ns / 1e9, found.p95_ns / 1e9) for found in each.percentiles}
    return {}


def closing_text(
    closing: Closing, *, full: bool, colour: bool, width: int, terminal: int | None = None
) -> str:
    """Return the end of a run for a terminal, with a last newline.

    Args:
        full: Also the whole phase table of each rank.
        terminal: Columns that these tables have room for; None if the text is not for a terminal.
    """
    rule = f"── torchperfd · run {closing.run} "
    named = [cause.rank for cause in closing.card.causes if cause.rank is not None]
    account = closing.card.account
    parts = [
        rule.ljust(width, "─"),
        closing.card.to_text(colour=colour, width=width),
        account_table(account, colour=colour, width=width)
        if account and account.has_more_than_phases
        else "",
        render(closing.reports, closing.percentiles, named=named, colour=colour, width=width),
        "\n\n".join(each.to_text(terminal) for each in closing.reports) if full else "",
        "\n".join(f"{name:<8}{value}" for name, value in closing.facts),
    ]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"
