"""``torchperfd run``: a script under torchperfd, unedited, in this very process."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperfd.launch.keeping_options import KeepingOptions, keeping_options
from torchperfd.launch.options import MODULE_OPTION, BadUsageError, CommandLine, read_words, usage
from torchperfd.launch.script import Script, show

if TYPE_CHECKING:
    from torchperfd.client import Client
    from torchperfd.launch.auto_capture import AutoCapture
    from torchperfd.link.embedded import EmbeddedDaemon
    from torchperfd.report import RankReport
    from torchperfd.runs.record import RunRecord
    from torchperfd.v1 import control_pb2

# Together they keep the promise that an exit is never delayed by more than a second.
_ALL_RANKS_BUDGET_S: Final = 0.4
_LEAVE_BUDGET_S: Final = 0.9
_LEAST_LEFT_S: Final = 0.4


@dataclass(slots=True)
class RunOptions:
    """Options on the command line of ``run``."""

    script: Script
    run: str | None = None
    job: str | None = None
    report: Path | None = None
    start_daemon: bool = True
    quiet: bool = False
    full: bool = False
    advise: bool = True
    on_oom: bool = False
    open_page: bool = False
    warnings: list[str] = field(default_factory=list)
    keeping: KeepingOptions = field(default_factory=KeepingOptions)
    began: float = field(default_factory=time.time, compare=False)


def main(argv: Sequence[str]) -> None:
    """Run a script as ``torchperfd run`` does; leaves as the script leaves."""
    try:
        options = parse(argv)
    except BadUsageError as error:
        joint = " " if str(error).endswith("?") else "; "
        sys.stderr.write(f"torchperfd: {error}{joint}see `torchperfd run --help`\n")
        sys.exit(2)
    if options is None:
        sys.stdout.write(usage())
    else:
        _run(options)


def parse(argv: Sequence[str]) -> RunOptions | None:
    """Read the command line; None when it asks for help. Everything after the script is the script's.

    Raises:
        BadUsageError: An unknown option, a missing value or no script.
    """
    line = read_words(argv)
    if line.wants_help:
        return None
    if line.awaited:
        raise BadUsageError(
            f"{line.awaited} needs a {'module' if line.awaited == MODULE_OPTION else 'value'}"
        )
    if not line.target and not line.is_module:
        raise BadUsageError("no script given")
    return _options(line)


def _options(line: CommandLine) -> RunOptions:
    values, flags = line.values, line.flags
    try:
        keeping = keeping_options(values, flags)
    except ValueError as error:
        raise BadUsageError(str(error)) from None
    return RunOptions(
        script=Script(line.target, line.arguments, is_module=line.is_module),
        run=values.get("--run"),
        job=values.get("--job"),
        report=Path(values["--report"]).absolute() if "--report" in values else None,
        start_daemon="--no-daemon" not in flags,
        quiet="--quiet" in flags,
        full="--full" in flags,
        advise="--no-advise" not in flags,
        on_oom="--on-oom" in flags,
        keeping=keeping,
        open_page="--open" in flags,
    )


def _run(options: RunOptions) -> None:
    from torchperfd.attachment import attach
    from torchperfd.launch import auto_capture
    from torchperfd.launch.lightning import LightningLauncher
    from torchperfd.launch.live_address import announce
    from torchperfd.link import embedded, stream

    script = options.script
    if not script.is_module and not Path(script.target).is_file():
        sys.stderr.write(f"torchperfd: can't open file {script.target!r}; is the path right?\n")
        sys.exit(2)
    # The identity, read in attach, names the run after the script.
    sys.argv = [script.target, *script.arguments]
    baseline = _baseline(options)
    daemon = None
    if options.start_daemon and int(os.environ.get("LOCAL_RANK", "0") or 0) == 0:
        daemon = embedded.start_unless_one_answers()
    if daemon is not None:
        stream.load_grpc()
    client = attach(run=options.run, job=options.job or _job_name(script), on_oom=options.on_oom)
    announce(client, quiet=options.quiet, open_page=options.open_page)
    launcher = LightningLauncher(client.run, options.job or _job_name(script))
    auto = auto_capture.begin(client, quiet=options.quiet, switched_off=not options.advise)
    ended: BaseException | None = None
    code = 0
    try:
        script.execute()
    except SystemExit as error:
        ended = error
    except BaseException as error:  # noqa: BLE001 - shown now, and raised again below
        show(error)
        ended = error
    finally:
        launcher.leave()
        try:
            code = _conclude(client, daemon, options, baseline, ended, auto)
        except KeyboardInterrupt as error:
            sys.stderr.write("torchperfd: interrupted before the end of the run was shown\n")
            ended = ended or error
        except Exception as error:  # noqa: BLE001 - the script has done its work: keep its exit code
            sys.stderr.write(f"torchperfd: the report could not be made: {error}\n")
    if ended is not None:
        if not isinstance(ended, SystemExit):
            # Shown already. Raised again so that the interpreter ends as it would have: with
            # status 1, or for KeyboardInterrupt by the signal itself.
            sys.excepthook = lambda *_: None
            raise ended
        if ended.code not in (None, 0):
            raise ended
    if code:
        sys.exit(code)
    if ended is not None:
        raise ended


def _baseline(options: RunOptions) -> "RunRecord | None":
    """Read the run to compare with; leaves before the script has begun where there is none."""
    from torchperfd.errors import TorchperfdError
    from torchperfd.identity import read_identity

    if not options.keeping.baseline or read_identity().rank != 0:
        return None
    from torchperfd.launch.baseline import read_baseline

    try:
        return read_baseline(options.keeping)
    except TorchperfdError as error:
        sys.stderr.write(f"torchperfd: --baseline: {error}\n")
        sys.exit(error.exit_code)


def _job_name(script: Script) -> str:
    return script.target if script.is_module else Path(script.target).stem


def _conclude(
    client: "Client",
    daemon: "EmbeddedDaemon | None",
    options: RunOptions,
    baseline: "RunRecord | None",
    ended: BaseException | None,
    auto: "AutoCapture | None",
) -> int:
    """Report, keep, compare and detach; return the exit code that the comparison asks for."""
    from torchperfd.card import ansi
    from torchperfd.launch import kept_run
    from torchperfd.launch.closing import Closing, closing_card, closing_text, percentiles_of
    from torchperfd.report import run_document
    from torchperfd.text_tables import terminal_width
    from torchperfd.v1 import access

    deadline = time.monotonic() + _LEAVE_BUDGET_S
    if auto is not None:
        auto.stop()
    finish_client(client)
    # Where a trace has taken that time, the report is kept and the totals are sent all the same.
    deadline = max(deadline, time.monotonic() + _LEAST_LEFT_S)
    advice = client.advice
    answer = _whole_run(client) if client.rank == 0 else None
    if answer is not None and answer.HasField("verdict"):
        # The daemon knows the name of the file only, not where it is.
        answer.verdict.script = options.script.words
    ranks = _rank_reports(client, answer)
    verdict = _verdict(answer)
    facts = [] if daemon is not None or not client.metrics_url else [("metrics", client.metrics_url)]
    document: dict[str, Any] = {}
    writer = None
    if client.rank == 0:
        document = run_document(client.run, ranks, verdict)
        kept_run.add_facts(document, client, began=options.began, ended=ended)
        if options.keeping.is_kept:
            writer = kept_run.ReportWriter(options.keeping, document)
    try:
        if options.report is not None and client.rank == 0:
            access.write_file(str(options.report), (json.dumps(document, indent=2) + "\n").encode())
            facts.append(("report", str(options.report)))
    except OSError as error:
        sys.stderr.write(f"torchperfd: cannot write the report: {error}\n")
    if writer is not None:
        facts.append(("kept", writer.outcome(deadline)))
    if not options.quiet and client.rank == 0:
        sys.stdout.flush()
        capture_id = client.parts.captures.newest_id or (auto.capture_id if auto is not None else "")
        card = closing_card(
            client.run,
            ranks,
            answer,
            advice=advice,
            capture_id=capture_id,
            trace=auto.trace_words(capture_id, client.captures_dir) if auto is not None else "",
        )
        closing = Closing(client.run, ranks, card, percentiles_of(answer, client.rank), facts)
        colour, width = ansi.wants_colour(sys.stderr), ansi.width_of(sys.stderr)
        terminal = terminal_width(sys.stderr)
        sys.stderr.write(
            closing_text(closing, full=options.full, colour=colour, width=width, terminal=terminal)
        )
    code = 0
    if baseline is not None:
        from torchperfd.launch.baseline import compare_with_baseline

        colour = ansi.wants_colour(sys.stderr)
        limit = options.keeping.fail_above
        code = compare_with_baseline(
            baseline, document, limit, sys.stderr.write, colour=colour, width=terminal_width(sys.stderr)
        )
    client.detach_by(deadline)
    if daemon is not None:
        daemon.leave(max(0.05, deadline - time.monotonic()))
    return code


def finish_client(client: "Client") -> None:
    """End the loop. Ctrl-C while the trace of a capture is written gives the trace up."""
    try:
        client.finish()
    except KeyboardInterrupt:
        client.parts.captures.give_up("interrupted while its trace was written")
        client.finish()


def _whole_run(client: "Client") -> "control_pb2.GetRunResponse | None":
    """Ask the daemon for all ranks, waiting a moment for those that are just ending."""
    from torchperfd.v1 import session_pb2

    deadline = time.monotonic() + _ALL_RANKS_BUDGET_S
    while True:
        left = deadline - time.monotonic()
        answer = client.whole_run(max(0.1, left))
        if answer is None:
            return None
        finished = [rank.state == session_pb2.RUN_STATE_FINISHED for rank in answer.ranks]
        world = max((rank.identity.world_size for rank in answer.ranks), default=1)
        if (all(finished) and len(finished) >= world) or left <= 0:
            return answer
        time.sleep(0.02)


def _rank_reports(client: "Client", answer: "control_pb2.GetRunResponse | None") -> list["RankReport"]:
    from torchperfd.link import wire
    from torchperfd.report import RankReport
    from torchperfd.steps.phases import PhaseNames

    # This process's own totals are complete, also where the daemon has not received all of them.
    reports = [client.report()]
    for rank in answer.ranks if answer is not None else ():
        if rank.identity.rank != client.rank:
            names = PhaseNames()
            totals = wire.read_totals(rank.account, names)
            dropped = rank.account.dropped_steps.get("ring", 0)
            blocks = wire.read_blocks(rank.account, names)
            reports.append(RankReport(rank.identity.rank, totals, names, dropped, blocks))
    return sorted(reports, key=lambda report: report.rank)


def _verdict(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    from torchperfd.card import command_after_run

    if answer is None or not answer.HasField("verdict"):
        return None
    verdict = answer.verdict
    return _cause(verdict, verdict.script) | {
        "next_command": command_after_run(verdict.next_command),
        "others": [_cause(other, verdict.script) for other in verdict.others],
    }


def _slow_line(verdict: "control_pb2.Verdict") -> dict[str, Any] | None:
    from torchperfd.slow_line import SlowLine

    if not verdict.HasField("line"):
        return None
    return {each.name: getattr(verdict.line, each.name) for each in fields(SlowLine)}


def _input_stages(verdict: "control_pb2.Verdict") -> dict[str, Any] | None:
    from torchperfd.input_stages import InputStages

    if not verdict.HasField("stages"):
        return None
    return asdict(InputStages(**{field.name: value for field, value in verdict.stages.ListFields()}))


def _cause(verdict: "control_pb2.Verdict", script: str) -> dict[str, Any]:
    from torchperfd.card.script_name import name_script

    return {
        "cause": verdict.cause,
        "summary": verdict.summary,
        "evidence": verdict.evidence,
        "line": _slow_line(verdict),
        "input_stages": _input_stages(verdict),
        "rank": verdict.rank if verdict.rank >= 0 else None,
        "node": verdict.node or None,
        "phase": verdict.phase or None,
        "cost_seconds_per_step": verdict.cost_seconds_per_step,
        "step_seconds": verdict.step_seconds or None,
        "stalled_seconds": verdict.stalled_seconds or None,
        "window_seconds": verdict.window_seconds or None,
        "fix": name_script(verdict.fix, script) or None,
        "saves_seconds": verdict.saves_seconds or None,
    }
