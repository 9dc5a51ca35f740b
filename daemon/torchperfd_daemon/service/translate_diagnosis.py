"""Conversion of accounts, goodput, stacks and verdicts between messages and the daemon's own types."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np

from torchperfd.model.messages import MAX_COUNT, AtMost, pack, unpack
from torchperfd.model.process import (
    ANOMALY_DETECTION,
    DETERMINISTIC,
    PYTHON_PROFILER,
    PYTHON_TRACER,
    TORCH_PROFILER,
    GroupProgress,
)
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis.verdict import Verdict, working_command
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.observer.mean_step import find_long_steps
from torchperfd_daemon.service.stack_requests import Report
from torchperfd_daemon.service.translate_verdict import verdict_to_message
from torchperfd_daemon.stacks.model import Outcome, RankStacks, Thread, tidy
from torchperfd_daemon.store.model import KindTotal, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, p50_and_p95

_WHERE: Final = frozenset(("ring", "outbox"))
_ELSEWHERE: Final = "other"


def totals_from_message(message: session_pb2.Account) -> Totals:
    """Unpack a cumulative account; numbers out of range are limited, so that they harm this rank only."""
    kinds = {kind.kind: unpack(kind, KindTotal) for kind in message.kinds}
    return unpack(
        message,
        Totals,
        train=kinds.get(session_pb2.STEP_KIND_TRAIN, KindTotal()),
        validate=kinds.get(session_pb2.STEP_KIND_VALIDATE, KindTotal()),
        dropped=_dropped(message.dropped_steps),
    )


def totals_to_message(own: Totals) -> session_pb2.Account:
    """Pack a cumulative account."""
    kinds = {session_pb2.STEP_KIND_TRAIN: own.train, session_pb2.STEP_KIND_VALIDATE: own.validate}
    message = pack(
        session_pb2.Account,
        own,
        dropped_steps=own.dropped,
        kinds=[pack(session_pb2.KindAccount, kind_own, kind=kind) for kind, kind_own in kinds.items()],
    )
    if own.warmup.steps:
        message.warmup.kind = session_pb2.STEP_KIND_TRAIN
    return message


def _dropped(message: Mapping[str, int]) -> dict[str, int]:
    """Return lost steps by place; places unknown to this version are counted as one."""
    found: dict[str, int] = {}
    for where, steps in message.items():
        place = where if where in _WHERE else _ELSEWHERE
        found[place] = min(found.get(place, 0) + steps, MAX_COUNT)
    return found


def run_goodput_to_message(own: RunGoodput) -> control_pb2.RunGoodput:
    """Pack a run's goodput."""
    ranks = [
        pack(
            control_pb2.RankGoodput,
            rank,
            bucket_seconds={each.value: time for each, time in rank.seconds.items()},
        )
        for rank in own.ranks
    ]
    return control_pb2.RunGoodput(run=own.run, ranks=ranks)


def run_goodput_from_message(message: control_pb2.RunGoodput) -> RunGoodput:
    """Unpack a run's goodput; a bucket of a later version is left out."""
    ranks = [
        unpack(rank, RankGoodput, seconds={each: rank.bucket_seconds.get(each.value, 0.0) for each in Bucket})
        for rank in message.ranks
    ]
    return RunGoodput(message.run, ranks)


_OUTCOMES: Final = {each: control_pb2.StackOutcome.Value(f"STACK_OUTCOME_{each.name}") for each in Outcome}
_OUTCOMES_IN: Final = {value: outcome for outcome, value in _OUTCOMES.items()}
_MAX_THREADS: Final = 256
_MAX_FRAMES: Final = 128


@dataclass(frozen=True, slots=True)
class _Groups:
    groups: Annotated[tuple[GroupProgress, ...], AtMost(64)]


def stack_report_from_message(message: session_pb2.StackReport) -> Report:
    """Unpack and tidy a rank's answer; its text ends up on terminals."""
    report = unpack(message, Report)
    return replace(report, threads=tidy(report.threads, message.package))


def collectives_from_message(message: session_pb2.CollectiveReport) -> tuple[GroupProgress, ...]:
    """Unpack the progress of a rank's process groups; its text ends up on terminals."""
    return unpack(message, _Groups).groups


def rank_stacks_to_message(run: str, uid: int | None, own: RankStacks) -> control_pb2.RankStacks:
    """Pack one rank's stacks; its process is of the user given."""
    return pack(
        control_pb2.RankStacks,
        own,
        identity=pack(session_pb2.RankIdentity, own, run=run),
        uid=uid,
        outcome=_OUTCOMES[own.outcome],
        threads=map(_thread_to_message, own.threads[:_MAX_THREADS]),
    )


def _thread_to_message(own: Thread) -> session_pb2.ThreadStack:
    frames = [pack(session_pb2.StackFrame, frame) for frame in own.frames[:_MAX_FRAMES]]
    return pack(session_pb2.ThreadStack, own, frames=frames)


def rank_stacks_from_message(message: control_pb2.RankStacks) -> RankStacks:
    """Unpack one rank's stacks, as a command receives them."""
    identity = message.identity
    return unpack(
        message,
        RankStacks,
        rank=identity.rank,
        world_size=identity.world_size,
        node=identity.node,
        pid=identity.pid,
        outcome=_OUTCOMES_IN.get(message.outcome, Outcome.NO_ANSWER),
    )


LONG_STEPS_WORDS: Final = "in a few long steps"
"""In the evidence of a verdict that has the mean of steps and their percentile."""
_MODULE: Final = "__main__.py"
"""The file that runs as a package; its name alone says nothing."""


def run_verdict_to_message(
    verdict: Verdict, ranks: Sequence[Rank], *, ended: Sequence[Rank] = ()
) -> control_pb2.Verdict:
    """Pack the verdict on a run; its commands work in the present state of the run's ranks.

    Args:
        ranks: Those that are here.
        ended: Those that were here and are not any more; they have the script's name only.
    """
    is_over = all(rank.has_ended for rank in ranks)
    command = working_command(
        verdict.next_command,
        is_over=is_over,
        has_cuda=any(rank.totals.cuda is not None for rank in ranks),
    )
    message = verdict_to_message(replace(verdict, next_command=command))
    message.remarks.extend(switch_remarks(each for rank in ranks for each in rank.totals.switches))
    long_steps = find_long_steps([*ranks, *ended])
    if long_steps is not None:
        message.remarks.append(long_steps.words(with_mean=LONG_STEPS_WORDS not in verdict.evidence))
    if is_over:
        message.failure = failure_words((*ranks, *ended))
    identities = [rank.identity for rank in (*ranks, *ended)]
    message.script = script_words((each.command, each.script) for each in identities)
    return message


def failure_words(ranks: Iterable[Rank]) -> str:
    """Return the exception that ended the first of a run's ranks that failed; empty if none did."""
    failed = min((rank for rank in ranks if rank.failure), key=lambda rank: rank.identity.rank, default=None)
    if failed is None:
        return ""
    return (
        f"rank {failed.identity.rank}: {failed.failure}" if failed.identity.world_size > 1 else failed.failure
    )


def switch_remarks(switches: Iterable[str]) -> list[str]:
    """Return what the debugging switches of a run's ranks cost, one line each."""
    costs = {
        ANOMALY_DETECTION: "forward and backward of small operators take several times as long",
        DETERMINISTIC: "some operators have no fast deterministic form",
        TORCH_PROFILER: "each operator of its steps is recorded",
        PYTHON_PROFILER: "each call of a function runs the profiler",
        PYTHON_TRACER: "each line of Python code runs the tracer",
        "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
        "TORCH_DISTRIBUTED_DEBUG": "collectives are checked on all ranks before each one",
        "PYTHONMALLOC": "each allocation of Python is checked",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor on the device is allocated anew",
        "python -X dev": "each allocation of Python is checked",
    }
    return [
        f"{each} is on: {costs.get(each) or costs.get(each.partition('=')[0], 'steps take longer')};"
        " switch it off once it is not needed"
        for each in dict.fromkeys(switches)
    ]


def script_words(names: Iterable[tuple[str, str]]) -> str:
    """Return the script of a run for a shell, with its arguments where they are known.

    Args:
        names: For each rank the command that it reports, and the name of its script. Without a command the
            name of a file is used; other names cannot be run, and the result is empty.
    """
    command, name = next(iter(names), ("", ""))
    is_file = name.endswith(".py") and name != _MODULE and name.isprintable()
    return command or (shlex.quote(name) if is_file else "")


def percentiles_to_messages(steps: StepColumns) -> list[control_pb2.PhasePercentiles]:
    """Return the percentiles of steps and of their phases; none without steps."""
    if not len(steps.duration_ns):
        return []
    columns = np.array([steps.duration_ns, *steps.phases.values()])
    medians, highest = p50_and_p95(columns)
    return [
        control_pb2.PhasePercentiles(phase=name, p50_ns=int(p50), p95_ns=int(p95))
        for name, p50, p95 in zip(("", *steps.phases), medians, highest, strict=True)
    ]
