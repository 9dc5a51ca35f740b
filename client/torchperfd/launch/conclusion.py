"""The end of a run: its report is made, kept, shown and compared, and the daemon gets what was measured."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchperfd.launch.script import Terminated, cause_elsewhere, failure_words
from torchperfd.safety.logs import log

if TYPE_CHECKING:
    from torchperfd.client import Client
    from torchperfd.launch.additions import AutoCapture, EmbeddedDaemon
    from torchperfd.launch.runner import RunOptions
    from torchperfd.report.rank import RankReport
    from torchperfd.report.record import RunRecord
    from torchperfd.v1 import control_pb2

# Together they keep the promise that an exit is never delayed by more than a second.
_ALL_RANKS_BUDGET_S: Final = 0.4
_RANKS_HERE_BUDGET_S: Final = 0.2
"""The same where the daemons of other nodes are asked afterwards."""
_ANSWER_S: Final = 0.1
"""What an answer takes beyond the time for which other nodes are asked."""
_EARLIER_RUNS_S: Final = 0.3
"""For which the comparison with earlier runs is waited for."""
_KEEPING_S: Final = 0.35
"""Of the time until the deadline, what is left for keeping the report and for the daemon."""
_LEAVE_BUDGET_S: Final = 0.9
_MIN_LEFT_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Ends a run.

    Attributes:
        daemon: The embedded daemon that this process has started, if any.
        baseline: The run to compare with, if any.
        auto: What captures by itself, if anything does.
    """

    client: "Client"
    daemon: "EmbeddedDaemon | None"
    options: "RunOptions"
    baseline: "RunRecord | None"
    auto: "AutoCapture | None"

    def conclude(self, ended: BaseException | None) -> int:
        """Report, keep, compare and detach; return the exit code that the comparison asks for.

        Args:
            ended: What the script raised; None where it reached its end.
        """
        deadline = time.monotonic() + _LEAVE_BUDGET_S
        notes = log.release()
        if self.auto is not None:
            self.auto.stop()
        # Before the message that this rank has finished, which carries it.
        self.client.parts.flusher.failure = failure_words(ended)
        finish_client(self.client)
        # Where a trace has taken that time, the report is kept and the totals are sent all the same.
        deadline = max(deadline, time.monotonic() + _MIN_LEFT_S)
        code = self._report(self.client.report(), ended, deadline, notes)
        self.client.detach_by(deadline)
        self._leave_daemon(deadline)
        return code

    def conclude_terminated(self) -> None:
        """Report, keep and compare while the main thread is within the script; the process ends afterwards.

        Hooks and captures are left alone, since the main thread may be in the middle of one.
        """
        deadline = time.monotonic() + _LEAVE_BUDGET_S
        notes = log.release()
        self.client.send_unfinished()
        self._report(self.client.last_report(), Terminated(), deadline, notes)
        # Nothing else will: the interpreter does not end.
        sys.stderr.flush()
        self.client.send_rest(deadline)
        self._leave_daemon(deadline)

    def _leave_daemon(self, deadline: float) -> None:
        if self.daemon is not None:
            self.daemon.leave(max(0.05, deadline - time.monotonic()))

    def _report(
        self, own: "RankReport", ended: BaseException | None, deadline: float, notes: Sequence[str]
    ) -> int:
        from torchperfd.report.rank import load_layouts

        load_layouts()
        from torchperfd.document.terminal import Page
        from torchperfd.launch import run_report
        from torchperfd.launch.earlier_runs import EarlierRuns, main_file
        from torchperfd.launch.run_report import (
            Closing,
            closing_card,
            closing_text,
            loader_advice_document,
            percentiles_of,
            verdict_document,
        )
        from torchperfd.model.messages import from_document
        from torchperfd.report.ending import TERMINATED, Ending
        from torchperfd.report.rank import run_document
        from torchperfd.v1.access import write_file

        client, options, auto = self.client, self.options, self.auto
        if client.rank != 0 or options.quiet:
            for note in notes:
                log.warning("%s", note)
        if client.rank != 0:
            return 0
        advice = client.advice
        earlier = EarlierRuns(
            options.keeping, options.location or main_file(), options.script.arguments, options.began
        )
        answer = _whole_run(client)
        if answer is not None and answer.HasField("verdict"):
            # The daemon knows the name of the file only, not where it is.
            answer.verdict.script = options.script.words
        ranks = _rank_reports(own, answer)
        document: dict[str, Any] = run_document(client.run, ranks, verdict_document(answer))
        document["loader_advice"] = loader_advice_document(answer)
        run_report.add_facts(document, client, began=options.began, ended=ended)
        cause = cause_elsewhere(answer, client.rank)
        document["exit"] |= {"cause": cause} if cause and ended is not None else {}
        ending = from_document(document["exit"], Ending)
        outcome = earlier.add_to(
            document, own, min(_EARLIER_RUNS_S, deadline - _KEEPING_S - time.monotonic())
        )
        if outcome is not None and outcome.words:
            client.parts.flusher.announce_outcome(outcome.words)
        facts = [("ended", ending.words)] if ending.state == TERMINATED else []
        if answer is not None and answer.HasField("verdict"):
            # Shown here only: what is kept has no arguments, which may hold secrets.
            answer.verdict.script = options.script.command
        facts += [("note", note) for note in notes]
        if self.daemon is None and client.parts.daemon_session.metrics_url:
            facts.append(("metrics", client.parts.daemon_session.metrics_url))
        writer = run_report.ReportWriter(options.keeping, document) if options.keeping.is_kept else None
        try:
            if options.report is not None:
                content = (json.dumps(document, indent=2) + "\n").encode()
                write_file(options.report, content)
                facts.append(("report", str(options.report)))
        except OSError as error:
            sys.stderr.write(f"torchperfd: cannot write the report: {error}\n")
        if writer is not None:
            facts.append(("kept", writer.outcome(deadline)))
        page = Page.of(sys.stderr)
        if not options.quiet:
            if ending.state != TERMINATED:
                sys.stdout.flush()
            capture_id = client.parts.captures.newest_id or (auto.capture_id if auto is not None else "")
            card = closing_card(
                client.run,
                ranks,
                answer,
                ending=ending,
                advice=advice,
                capture_id=capture_id,
                trace=auto.trace_words() if auto is not None else "",
                outcome=outcome.words if outcome is not None else "",
            )
            closing = Closing(client.run, ranks, card, percentiles_of(answer, client.rank), facts)
            sys.stderr.write(closing_text(closing, page, full=options.full))
        if self.baseline is None:
            return 0
        from torchperfd.launch.earlier_runs import compare_with_baseline

        return compare_with_baseline(
            self.baseline,
            document,
            options.keeping.fail_above,
            sys.stderr.write,
            colour=page.colour,
            width=page.columns,
        )


def finish_client(client: "Client") -> None:
    """End the loop. Ctrl-C while the trace of a capture is written gives the trace up."""
    try:
        client.finish()
    except KeyboardInterrupt:
        client.parts.captures.give_up("interrupted while its trace was written")
        client.finish()


def _whole_run(client: "Client") -> "control_pb2.GetRunResponse | None":
    """Ask the daemon for all ranks, waiting a moment for those that are just ending.

    Where the job has ranks on other nodes, their daemons are asked for the verdict while they live.
    """
    from torchperfd.parts import END_VERDICT_S
    from torchperfd.v1 import session_pb2

    world = client.parts.identity.world_size
    here = min(world, _ranks_here(world))
    budget = _ALL_RANKS_BUDGET_S if here == world else _RANKS_HERE_BUDGET_S
    deadline = time.monotonic() + budget
    while True:
        left = deadline - time.monotonic()
        answer = client.whole_run(max(0.1, left))
        if answer is None:
            return None
        finished = [rank.state == session_pb2.RUN_STATE_FINISHED for rank in answer.ranks]
        if (all(finished) and len(finished) >= here) or left <= 0:
            break
        time.sleep(0.02)
    if len(answer.ranks) >= world:
        return answer
    return client.whole_run(END_VERDICT_S + _ANSWER_S, END_VERDICT_S) or answer


def _ranks_here(world: int) -> int:
    """Return how many ranks the launcher has started on this node; ``world`` where it does not say so."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or ""
    return int(given) if given.isdecimal() and int(given) else world


def _rank_reports(own: "RankReport", answer: "control_pb2.GetRunResponse | None") -> list["RankReport"]:
    from torchperfd.link import wire
    from torchperfd.report.rank import RankReport
    from torchperfd.steps.phases import PhaseNames

    # This process's own totals are complete, also where the daemon has not received all of them.
    reports = [own]
    for rank in answer.ranks if answer is not None else ():
        if rank.identity.rank != own.rank:
            names = PhaseNames()
            totals = wire.totals_from_message(rank.account, names)
            dropped = rank.account.dropped_steps.get("ring", 0)
            blocks = wire.blocks_from_message(rank.account, names)
            reports.append(RankReport(rank.identity.rank, totals, names, dropped, blocks))
    return sorted(reports, key=lambda report: report.rank)
