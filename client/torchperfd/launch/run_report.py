"""The report of a run at its end: its document with the verdict, the kept file, the text on the terminal."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torchperfd._version import __version__
from torchperfd.document.blocks import Document, Facts, Heading
from torchperfd.document.terminal import Page, render
from torchperfd.launch.options import KeepingOptions
from torchperfd.launch.script import exit_document
from torchperfd.model.card import VerdictCard, card_of
from torchperfd.report.ending import Ending, failure_remedy
from torchperfd.report.overview import Percentiles, account_bars, overview, validation_waits
from torchperfd.report.rank import RankReport, blocks_document
from torchperfd.report.store import RunStore
from torchperfd.v1 import contract, control_pb2

if TYPE_CHECKING:
    from torchperfd.client import Client
    from torchperfd.v1 import control_pb2


def ended_card(
    run: str,
    reports: Sequence[RankReport],
    verdict: control_pb2.Verdict | None,
    ending: Ending,
    advice: str = "",
) -> VerdictCard:
    """Return the card of a run that has ended. A failure comes first, whatever was seen before it.

    Args:
        verdict: None if no daemon has answered.
        advice: What to do where training was seen but no step of it; empty if unknown.
    """
    failure, also = ending.failure, tuple(validation_waits(reports))
    remedy = failure_remedy(failure)
    if not any(each.totals.train.steps for each in reports):
        why = ending.why_untrained(advice)
        if failure:
            return VerdictCard(run, failure=why, remedy=remedy)
        return VerdictCard(run, remark=why, also=also)
    if verdict is None:
        card = VerdictCard(run, remark="no daemon has answered, so nothing compared the steps")
    else:
        card = card_of(verdict)
    if failure and remedy:
        # Such as a dead worker, for which the loop has waited: what the steps lost comes from it. Memory that
        # grew may be why.
        beside = tuple(cause for cause in card.causes if not cause.cost_seconds)
        return VerdictCard(run, beside, failure=failure, remedy=remedy)
    return replace(card, also=(*card.also, *also), failure=failure)


_DAEMON_S: Final = 0.2
"""Of the time until the deadline, what is left for the daemon."""


def add_facts(
    document: dict[str, Any], client: "Client", *, began: float, ended: BaseException | None
) -> None:
    """Add to a run's document what comparisons need.

    Args:
        document: Of schema ``torchperfd.run/1``.
        client: Of this process, after its loop has ended.
        began: When the run began, Unix seconds.
        ended: What the script raised; None where it reached its end.
    """
    identity = client.parts.identity
    # Behind the facts, so that a reader finds these in the first kilobyte.
    verdict, ranks = document.pop("verdict"), document.pop("ranks")
    document |= {
        "source": None,
        "script": identity.script,
        "job": identity.job_name,
        "host": identity.node or socket.gethostname(),
        "world_size": identity.world_size,
        "started_seconds": began,
        "ended_seconds": time.time(),
        "exit": exit_document(ended),
        "versions": {
            "torchperfd": __version__,
            "python": identity.python_version,
            "torch": str(torch.__version__) if (torch := sys.modules.get("torch")) else None,
        },
        "environment": _environment_facts(),
        "settings": {},
        "promise": None,
        "loader_advice": document.get("loader_advice"),
        "verdict": verdict,
        "ranks": ranks,
    }
    blocks = blocks_document(client.parts.flusher.blocks.sums(), client.parts.instruments.names)
    for rank in document["ranks"]:
        if rank["rank"] == client.rank:
            rank["blocks"] = blocks


class ReportWriter:
    """Keeps the report of a run, on a thread of its own: a disk that hangs must not delay the exit.

    Args:
        options: Where to.
        document: Must not change any more.
    """

    def __init__(self, options: KeepingOptions, document: dict[str, Any]) -> None:
        self.run_id = ""
        self.problem = ""
        self._store = RunStore(options.directory or contract.user_runs_dir())
        self._document = document
        self._thread = threading.Thread(target=self._keep, name="torchperfd-keep-run", daemon=True)
        self._thread.start()

    def outcome(self, deadline: float) -> str:
        """Wait until the report is kept, or until ``deadline`` on the monotonic clock; return the outcome.

        Returns:
            The command that shows the report, or why it is not kept.
        """
        self._thread.join(max(0.05, deadline - _DAEMON_S - time.monotonic()))
        if self._thread.is_alive():
            return "not: the disk is too slow"
        return f"not: {self.problem}" if self.problem else f"torchperfd runs show {self.run_id}"

    def _keep(self) -> None:
        try:
            self.run_id = self._store.keep(self._document)
        except Exception as error:  # noqa: BLE001 - the run is over, and its report is no reason to fail
            self.problem = str(error)


def _environment_facts() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    facts: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    # Facts that a comparison can do without: a torch that lacks one is no reason to keep no report.
    with contextlib.suppress(Exception):
        facts["threads"] = int(torch.get_num_threads())
        if torch.cuda.is_initialized():
            facts["device"] = str(torch.cuda.get_device_name())
    return facts


def verdict_document(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    """Return the verdict; None if no daemon has answered, or has none."""
    from torchperfd.model.verdict_document import verdict_to_report

    return verdict_to_report(answer.verdict) if answer is not None and answer.HasField("verdict") else None


def loader_advice_document(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    """Return what the run was advised on its loaders; None if that was not settled."""
    from torchperfd.model.verdict_document import SettledAdvice

    if answer is None or not answer.HasField("loader_advice"):
        return None
    settled = SettledAdvice.from_message(answer.loader_advice)
    return None if settled is None else settled.to_dict()


@dataclass(frozen=True, slots=True)
class Closing:
    """What the end of a run shows.

    Attributes:
        reports: Those of its ranks, by rank.
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


def closing_text(closing: Closing, page: Page | None = None, *, full: bool = False) -> str:
    """Return the end of a run for a terminal, with a last newline.

    Args:
        full: Also the whole phase table of each rank.
    """
    return f"\n{render(closing_document(closing, full=full), page)}\n"


def closing_document(closing: Closing, *, full: bool) -> Document:
    """Return the end of a run: its verdict, its account, its overview, and further facts."""
    named = [cause.rank for cause in closing.card.causes if cause.rank is not None]
    account = closing.card.account
    found = Document([[Heading(f"torchperfd · run {closing.run}", is_rule=True)]]) + closing.card.document()
    if account and account.has_more_than_phases:
        found += Document([[account_bars(account)]])
    found += overview(closing.reports, closing.percentiles, named=named)
    for each in closing.reports if full else ():
        found += each.document()
    return found + Document([[Facts(closing.facts, column=8, fold="never")]])
