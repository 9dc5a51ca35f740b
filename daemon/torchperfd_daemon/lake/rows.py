"""Rows of the lake's tables, made from what the daemon knows. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.v1.contract import PHASES
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.diagnosis.verdict import Verdict, public_evidence
from torchperfd_daemon.goodput.totals import RankGoodput
from torchperfd_daemon.lake.reports import report_of
from torchperfd_daemon.lake.tables import CAPTURES, GOODPUT, RUNS, STEPS, VERDICTS, Row
from torchperfd_daemon.store.history import SecondColumns
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank

SPAN_S: Final = 10
"""Seconds in one row of steps."""

Named = tuple[str, Row]
"""A table's name and a row of it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from: the values of the common columns."""

    node: str
    run: str
    job: str = ""
    owner: str = ""

    def columns(self) -> dict[str, Any]:
        """Return the common columns."""
        return {"node": self.node, "run": self.run, "job": self.job, "owner": self.owner}


def step_rows(source: Source, rank: int, seconds: SecondColumns) -> Iterator[Named]:
    """Yield a row for each ten seconds in which steps ended."""
    starts = seconds.unix_seconds // SPAN_S * SPAN_S
    totals = seconds.steps * seconds.step_seconds
    for start in dict.fromkeys(starts.tolist()):
        here = starts == start
        steps = seconds.steps[here]
        spent = {name: float(steps @ column[here]) for name, column in seconds.phase_seconds.items()}
        named = {f"{name}_seconds": round(spent.get(name, 0.0), 6) for name in PHASES}
        yield (
            STEPS,
            {
                **source.columns(),
                "time_unix_seconds": float(start),
                "rank": rank,
                "steps": int(steps.sum()),
                "seconds": round(float(totals[here].sum()), 6),
                "longest_seconds": round(float(seconds.longest_seconds[here].max()), 6),
                **named,
                "user_seconds": round(sum(spent[name] for name in spent.keys() - set(PHASES)), 6),
            },
        )


def goodput_row(source: Source, goodput: RankGoodput, before: Mapping[str, float]) -> Named | None:
    """Return what was added to a rank's goodput since a row before; None if nothing was.

    Time of a step in progress may move to another bucket afterwards, which that row then has less of.

    Args:
        before: The seconds by bucket up to then, and ``until``; empty without a row.
    """
    since = before.get("until", goodput.since_unix_seconds)
    if goodput.until_unix_seconds <= since:
        return None
    spent = {
        f"{bucket.value}_seconds": round(seconds - before.get(bucket.value, 0.0), 6)
        for bucket, seconds in goodput.seconds.items()
    }
    return (
        GOODPUT,
        {
            **source.columns(),
            "since_unix_seconds": since,
            "until_unix_seconds": goodput.until_unix_seconds,
            "rank": goodput.rank,
            "gpus": goodput.gpus,
            "starts": goodput.starts,
            **spent,
        },
    )


def goodput_mark(goodput: RankGoodput) -> dict[str, float]:
    """Return what :func:`goodput_row` needs of a row's goodput for the row after it."""
    seconds = {bucket.value: seconds for bucket, seconds in goodput.seconds.items()}
    return {**seconds, "until": goodput.until_unix_seconds}


def verdict_rows(
    source: Source,
    verdicts: Sequence[Verdict],
    span: tuple[float, float],
    lost: Mapping[str, float],
    gpus: int,
) -> Iterator[Named]:
    """Yield a row for each verdict that stood in a span.

    Args:
        span: Its start and its end, in Unix seconds.
        lost: The time that each cause cost the run in it, in seconds.
        gpus: GPUs of the run's ranks on this node.
    """
    for position, verdict in enumerate(verdicts):
        account = json.dumps(verdict.account.to_document()) if verdict.account is not None else None
        yield (
            VERDICTS,
            {
                **source.columns(),
                **_span(*span),
                **_cost(verdict),
                "position": position,
                "culprit_rank": verdict.rank,
                "gpus": gpus,
                "culprit_node": verdict.node,
                "phase": verdict.phase,
                "account": account,
                "lost_seconds": round(lost.get(verdict.cause.value, 0.0), 6),
            },
        )


def run_row(source: Source, ranks: Sequence[Rank], verdict: Verdict, now: float, device: str = "") -> Named:
    """Return the row of a run whose ranks on this node have all ended.

    Args:
        device: The model of its first rank's GPU; empty without one.
    """
    first = ranks[0]
    identity = first.identity
    means = [rank.totals.steady_means() for rank in ranks]
    steps = [seconds for count, seconds, _ in means if count]
    began = [rank.totals.began_ns / 1e9 for rank in ranks if rank.totals.began_ns]
    ended = [rank.totals.ended_ns / 1e9 for rank in ranks if rank.totals.ended_ns]
    return (
        RUNS,
        {
            **source.columns(),
            **_span(min(began, default=now), max(ended, default=now)),
            "ending": _ending(ranks),
            "outcome": next((rank.outcome for rank in ranks if rank.outcome), ""),
            "ranks": len(ranks),
            "world_size": identity.world_size,
            "gpus": gpus_of(ranks),
            "steps": max(rank.totals.train.steps for rank in ranks),
            "samples": float(sum(rank.totals.train.samples for rank in ranks)),
            "mean_step_seconds": sum(steps) / len(steps) if steps else None,
            **_cost(verdict),
            "torch_version": identity.torch_version,
            "python_version": identity.python_version,
            "client_version": first.client_version,
            "slurm_job_id": identity.slurm_job_id,
            "pod_uid": identity.pod_uid,
            "report": report_of(ranks, verdict, device),
        },
    )


def _ending(ranks: Sequence[Rank]) -> str:
    if any(rank.failure for rank in ranks):
        return "failed"
    return "finished" if all(rank.state is State.FINISHED for rank in ranks) else "left"


def capture_row(source: Source, record: CaptureRecord) -> Named:
    """Return the row of a capture that has ended."""
    return (
        CAPTURES,
        {
            **source.columns(),
            **_span(record.requested_at, record.ended_at or record.requested_at),
            "capture_id": record.capture_id,
            "trigger": record.trigger,
            "state": record.state.value,
            "reason": record.reason,
            "ranks": len(record.ranks),
            "bytes": sum(trace.bytes for trace in record.ranks),
        },
    )


def gpus_of(ranks: Iterable[Rank]) -> int:
    """Return how many of the ranks use a GPU."""
    return sum(rank.totals.cuda is not None for rank in ranks)


def gpu_uuid_of(ranks: Iterable[Rank]) -> str:
    """Return the UUID of the first rank's GPU, without ``GPU-``; empty without one."""
    cuda = min(ranks, key=lambda rank: rank.identity.rank).totals.cuda
    return cuda.device_uuid if cuda is not None else ""


def _span(since: float, until: float) -> dict[str, float]:
    return {"since_unix_seconds": since, "until_unix_seconds": until}


def _cost(verdict: Verdict) -> dict[str, Any]:
    return {
        "cause": verdict.cause.value,
        # Other users may read the lake, too.
        "evidence": public_evidence(verdict.cause.value, verdict.evidence),
        "fix": verdict.fix,
        "step_seconds": verdict.step_seconds,
        "cost_seconds_per_step": verdict.cost_seconds_per_step,
        "saves_seconds": verdict.saves_seconds,
    }
