"""``torchperfd diagnose``, ``torchperfd stacks``, and ``torchperfd explain`` with the page of a cause."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from torchperfd.document.blocks import Code, Document, Facts, Heading, Sentences
from torchperfd.document.text import fold_text, text_width
from torchperfd.model.card import card_of
from torchperfd.model.formatting import did_you_mean
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd.v1.contract import PHASES
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import Seconds, fleet_option, json_option, one_run_option, refuse_given
from torchperfd_cli.commands._output import Answer, emit, live, page, plain
from torchperfd_cli.commands._scope import Scope, missing, scope_options, unreachable_text, whole_run
from torchperfd_cli.commands._series import SeriesOptions
from torchperfd_cli.commands.open import LINK, shipped_folder
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks import flight_recorder as dumps_report
from torchperfd_daemon.stacks.flight_recorder import judge
from torchperfd_daemon.stacks.flight_recorder_dumps import read_dumps
from torchperfd_daemon.stacks.merge import merge
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.stacks.report import stacks_document, to_dict
from torchperfd_daemon.text import ranks_phrase, ranks_text
from torchperfd_daemon.views.documents import absent_ranks, each_once, fleet_dict
from torchperfd_daemon.views.model import parse_ranks


@click.command("diagnose")
@scope_options
@click.option(
    "--slurm-job",
    default="",
    metavar="ID",
    help="One line on a Slurm job that is over: the verdict on its newest run, and its goodput.",
)
@live
def diagnose_command(
    run: str,
    job: str,
    fleet: bool,
    series: SeriesOptions,
    slurm_job: str,
    socket: str | None,
    as_json: bool,
) -> Answer:
    """Explain why each run is slow: each cause with its cost, the evidence, a fix and the next command.

    With --fleet or --job, one verdict on the ranks of all nodes; daemons that do not answer are named
    (exit code 5). With --prometheus, the same from series.
    """
    if slurm_job:
        from torchperfd_cli.commands._slurm_job import SlurmJob, job_line

        if run or job or fleet or series.is_given or as_json or click.get_current_context().params["watch"]:
            raise UsageError("--slurm-job prints one line on one job", "leave out the other options")
        return Answer(plain(job_line(SlurmJob.of_environment(slurm_job, os.environ), socket)))
    scope = Scope(run, job, fleet, series)
    with scope.connect(socket) as daemon:
        answer = scope.whole(daemon).verdicts(daemon)
    if as_json:
        verdicts = [verdict_to_document(each) for each in answer.verdicts]
        document = {"schema": "torchperfd.diagnosis/1", "verdicts": verdicts, **fleet_dict(answer)}
        return Answer(document, missing=missing(answer))
    found = Document([])
    for each in answer.verdicts:
        found += verdict_document(each)
    return Answer(found, missing=missing(answer))


def verdict_document(verdict: control_pb2.Verdict) -> Document:
    """Return the card of a verdict, below the name of its run."""
    [card] = card_of(verdict).document().sections
    return Document([[Heading(f"run {verdict.run}", style="bold", fold="never"), *card]])


_ITEM: Final = re.compile(r" *(?:- |\d+\. )")
_ALIASES: Final[Mapping[str, Cause]] = {"healthy": Cause.NONE}
"""What screens call a cause."""
_HOST: Final = (
    *(Cause.HOST_BOUND, Cause.CPU_CONTENTION, Cause.GARBAGE_COLLECTION),
    *(Cause.TOO_MANY_THREADS, Cause.INTERPRETER_LOCK, Cause.DEBUG_SWITCH, Cause.GROWING_STEPS),
)
_OF_PHASES: Final[Mapping[str, tuple[Cause, ...]]] = {
    "data": (
        *(Cause.INPUT_BOUND, Cause.SLOW_IO),
        *(Cause.EPOCH_START, Cause.SLOW_WORKER, Cause.WORKER_OVERHEAD, Cause.CPU_AFFINITY),
    ),
    "h2d": (Cause.SYNCHRONISATION,),
    "collective_wait": (*(Cause.SLOW_RANK, Cause.UNEVEN_WORK, Cause.SCRIPT_COLLECTIVES, Cause.COLLECTIVE),),
    "checkpoint": (Cause.CHECKPOINT,),
    "other": (Cause.SCRIPT_CODE, *_HOST),
}
"""The causes of a long phase; of all other phases, what makes the host slow."""


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(cause.slug) for cause in Cause if cause.slug.startswith(incomplete)]


@click.command("explain")
@click.argument("name", metavar="[CAUSE]", required=False, shell_complete=_complete)
@json_option
def explain_command(name: str | None, as_json: bool) -> None:
    """Explain a cause of lost time: what it means, how to confirm it, and the fix.

    Without CAUSE, list all causes. For a phase, such as data or forward, print the causes that make it long.
    """
    named = _named(name) if name else None
    if as_json:
        emit({"schema": "torchperfd.explain/1", **_document(named)})
    elif isinstance(named, Cause):
        text, width = page_text(named.slug), page().columns
        emit(plain(text if width is None else _folded_page(text, width)))
    else:
        emit(_list() if named is None else _phase_document(named))


def _named(name: str) -> Cause | str:
    """Return the cause of a name, or the phase."""
    slug = "-".join(name.lower().replace("_", " ").split())
    causes = {**{cause.slug: cause for cause in Cause}, **_ALIASES}
    if slug in causes:
        return causes[slug]
    phase = slug.replace("-", "_")
    if phase in PHASES:
        return phase
    hint = did_you_mean(slug, [*causes, *PHASES])
    raise UsageError(f"no cause {name[:80]}", hint or "`torchperfd explain` lists all")


def _document(named: Cause | str | None) -> dict[str, Any]:
    if isinstance(named, Cause):
        return {"cause": named.slug, "meaning": _first_sentence(named.slug), "page": page_text(named.slug)}
    causes = Cause if named is None else _causes_of(named)
    listed = [{"cause": cause.slug, "meaning": _first_sentence(cause.slug)} for cause in causes]
    return {"phase": named, "causes": listed}


def _causes_of(phase: str) -> tuple[Cause, ...]:
    return _OF_PHASES.get(phase, _HOST)


def _phase_document(phase: str) -> Document:
    commands = [f"torchperfd explain {cause.slug}" for cause in _causes_of(phase)]
    words = (
        f"{phase} is a phase of the step, not a cause. The page on phases, docs/phases.md, has where it"
        " begins and ends. What can make it long:"
    )
    return Document([[Sentences([words]), Code(commands, indent=2)]])


def page_text(slug: str) -> str:
    """Return the page on a cause as plain text, without a last newline.

    Raises:
        TorchperfdError: The package was installed without its pages.
    """
    # The target of a link is not there in a terminal; its text remains.
    return LINK.sub(r"\1", _page(slug).read_text(encoding="utf-8")).rstrip()


def _folded_page(page: str, width: int) -> str:
    """Return a page no wider than a terminal: paragraphs and items are folded anew, code line by line."""
    if max(map(text_width, page.split("\n"))) <= width:
        return page
    lines: list[str] = []
    is_code = is_text = False
    for line in page.split("\n"):
        is_fence = line.lstrip().startswith("```")
        begins = is_fence or not line or _ITEM.match(line)
        if is_text and not begins:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        is_code ^= is_fence
        is_text = bool(line) and not is_code and not is_fence
    return "\n".join(fold_text(line, width, margin=_text_begins(line)) for line in lines)


def _text_begins(line: str) -> int:
    item = _ITEM.match(line)
    return item.end() if item else len(line) - len(line.lstrip())


def _list() -> Document:
    return Document([[Facts([(cause.slug, _first_sentence(cause.slug)) for cause in Cause])]])


def _first_sentence(slug: str) -> str:
    """Return the first sentence of the page on a cause, up to a colon that explains it."""
    meaning = page_text(slug).split("\n\n", 2)[1]
    return re.split(r"[.:](?:\s|$)", " ".join(meaning.split()), maxsplit=1)[0]


def _page(slug: str) -> Path:
    page = shipped_folder("docs/causes") / f"{slug}.md"
    if page.is_file():
        return page
    raise TorchperfdError(
        "the pages on causes are not part of this installation", "install torchperfd from its wheel"
    )


@click.command("stacks")
@one_run_option
@click.option("--ranks", default="", metavar="0,8-15", help="Which ranks; all by default.")
@click.option(
    "--timeout",
    type=Seconds(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for any rank.",
)
@click.option(
    "--signal",
    is_flag=True,
    help="Send a signal to a rank that neither answers nor can be read by py-spy. This can crash the rank:"
    " two of three processes did not survive 2,000 signals. Not with --fleet.",
)
@click.option(
    "--from",
    "dumps",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Flight Recorder dumps of a dead job: a directory of nccl_trace_rank_*, or files. Asks no daemon.",
)
@fleet_option
@live
def stacks_command(
    dumps: tuple[Path, ...],
    run: str,
    ranks: str,
    timeout: float,
    signal: bool,
    fleet: bool,
    socket: str | None,
    as_json: bool,
) -> Answer:
    """Show where every thread of every rank is, also while ranks hang.

    Ranks with the same stack are shown once, and the ranks that the others wait for are named.
    A rank that does not answer is read from outside by py-spy, if that is installed and permitted.
    With --fleet, the ranks on all nodes.

    With --from, name the ranks that the others waited for, by what torch's Flight Recorder has left of a job
    that is dead.
    """
    context = click.get_current_context()
    if dumps:
        others = {parameter.name or "" for parameter in context.command.params} - {"dumps", "as_json"}
        refuse_given(context, others, "is for live runs, not for dumps")
        return _dumps_answer(dumps, as_json=as_json)
    if context.params["watch"] and signal:
        raise UsageError("--signal can crash a rank, so it is not repeated", "leave out --watch or --signal")
    request = control_pb2.StacksRequest(
        ranks=parse_ranks(ranks), timeout_seconds=timeout, allow_signal=signal, fleet=fleet
    )
    answers: list[RankStacks] = []
    unreachable: list[control_pb2.UnreachablePeer] = []
    with connect(socket) as daemon:
        request.run = whole_run(daemon, run, fleet=fleet)
        # The daemon keeps the deadline; ours is only there in case it dies.
        for message in daemon.Stacks(request, timeout=timeout + 10):
            if message.HasField("unreachable"):
                unreachable.append(message.unreachable)
                continue
            run = message.identity.run
            answers.append(translate_diagnosis.rank_stacks_from_message(message))
    if not answers:
        raise TorchperfdError("the daemon reported no rank", "see its log")
    answers = each_once(answers)
    absent = absent_ranks(answers, request.ranks)
    merged = merge(answers)
    problems = [f"rank {rank.rank} has no stacks: {rank.outcome.value}" for rank in merged.without_stacks]
    if absent:
        where = "on no node that answers" if fleet else "not here: on other nodes"
        problems.append(f"ranks {ranks_text(absent)} are {where}, or gone for a minute")
    if unreachable:
        problems.append(unreachable_text(unreachable))
    return Answer(
        to_dict(run, answers, merged, absent) if as_json else stacks_document(run, answers, merged),
        missing="; ".join(problems),
    )


def _dumps_answer(paths: Sequence[Path], *, as_json: bool) -> Answer:
    found = read_dumps(paths)
    verdict = judge(found.dumps)
    problems = [error for _, error in found.failed]
    if verdict.undumped:
        problems.append(f"there is no dump of {ranks_phrase(verdict.undumped)}")
    return Answer(
        (dumps_report.to_dict if as_json else dumps_report.dumps_document)(found, verdict),
        missing="; ".join(problems),
    )
