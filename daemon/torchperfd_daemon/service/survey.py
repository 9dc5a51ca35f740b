"""This node's part of a survey of all nodes: its ranks' steps in blocks, and verdicts."""

from collections.abc import Callable, Sequence

import numpy as np

from torchperfd.v1 import control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.diagnosis.detect.straggler import MIN_STEPS, RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.service import translate, translate_verdict
from torchperfd_daemon.store import HISTORY_STEPS, Rank, Store

PublishedVerdict = Callable[[str], Verdict | None]
"""Returns the published verdict on a run; None before there is one."""

DeviceWork = Callable[[Rank], RankWork | None]
"""Returns a rank's newest steps on its device, in means of a second; None without device times."""

RecentCollections = Callable[[Rank], Sequence[Pauses]]
"""Returns a rank's garbage collections since its steps last changed; none where that is not known."""


def ranks_of(store: Store, run: str, job: str) -> list[Rank]:
    """Return the ranks of a run and of a job on this node; an empty name selects all."""
    store.forget_departed()
    return [
        rank
        for rank in store.ranks()
        if run in ("", rank.identity.run) and job in ("", rank.identity.job_name)
    ]


def survey(
    store: Store, held: PublishedVerdict, device_work: DeviceWork, request: fleet_pb2.NodeSurveyRequest
) -> fleet_pb2.NodeSurvey:
    """Return the survey of the requested ranks; it may be empty."""
    ranks = ranks_of(store, request.run, request.job)
    answer = fleet_pb2.NodeSurvey(ranks=[blocks(rank, request.newest, device_work(rank)) for rank in ranks])
    if request.verdicts:
        answer.verdicts.extend(verdicts(ranks, held))
    return answer


def verdicts(ranks: Sequence[Rank], held: PublishedVerdict) -> list[control_pb2.Verdict]:
    """Return the verdict on each run that the ranks are of, by name."""
    runs: dict[str, list[Rank]] = {}
    for rank in ranks:
        runs.setdefault(rank.identity.run, []).append(rank)
    return [
        translate_verdict.verdict_on_ranks(verdict_on(run, runs[run], held), runs[run])
        for run in sorted(runs)
    ]


def verdict_on(run: str, ranks: Sequence[Rank], held: PublishedVerdict) -> Verdict:
    """Return the published verdict on a run; before there is one, that on its mean step."""
    return held(run) or verdict_on_mean_step(run, ranks)


def blocks(rank: Rank, newest: int, on_device: RankWork | None = None) -> control_pb2.RankSteps:
    """Return a rank's newest steps as the means of at most two dozen blocks of equal length.

    The comparison of ranks (``find_stragglers``) takes means over as many blocks, so its result does not
    change; a rank with nine phases takes 1.4 KiB.

    Args:
        newest: How many steps; 0 for the present ones (``Rank.present_steps``).
        on_device: Its newest steps on its device.
    """
    steps = rank.history.newest(min(newest or HISTORY_STEPS, rank.steady_steps))
    held = len(steps.duration_ns) if newest else rank.present_steps
    length = max(1, held // MIN_STEPS)
    count = held if length == 1 else MIN_STEPS

    def means(column: Sequence[int]) -> bytes:
        newest_of_all = np.asarray(column, dtype=np.int64)[len(column) - count * length :]
        packed: bytes = newest_of_all.reshape(count, length).mean(axis=1).astype("<i8").tobytes()
        return packed

    ends = np.asarray(steps.end_unix_ns, dtype=np.int64)[len(steps.end_unix_ns) - count * length :]
    return control_pb2.RankSteps(
        status=translate.rank_status(rank),
        first_step=max(0, rank.next_step - count * length),
        count=count,
        end_ns=ends[length - 1 :: length].astype("<i8").tobytes(),
        duration_ns=means(steps.duration_ns),
        phases=[
            session_pb2.PhaseColumn(phase=name, ns=means(column)) for name, column in steps.phases.items()
        ],
        device_phases=translate.device_phases(on_device),
        block_steps=length,
    )
