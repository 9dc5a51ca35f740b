"""The data that live commands and the live page show of runs, ranks and steps: numbers, and documents."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from torchperfd.model.messages import to_document
from torchperfd.v1 import control_pb2
from torchperfd_daemon.diagnosis.detect.straggler import RankWork, Straggler, find_stragglers, mean_of
from torchperfd_daemon.service.translate_work import (
    comparison_from_messages,
    device_work_from_message,
    rank_work_from_message,
)
from torchperfd_daemon.views.model import (
    WAIT,
    RankView,
    RunView,
    rank_state,
    rank_view,
    reported_state,
    steady,
)

_RANK_FIELDS: Final = (
    *("rank", "node", "pid", "state", "stalled_seconds", "coordinates", "steps", "window_steps"),
    *(
        "step_seconds",
        "phase_seconds",
        "own_seconds",
        "host_memory",
        "behind_seconds",
        "behind_ratio",
        "slow",
    ),
)
"""Those of a rank in documents, in their order."""


def spent(own: RankWork, phase: str) -> bool:
    return phase in own.phase_seconds and bool(own.phase_seconds[phase].any())


def present(messages: Sequence[control_pb2.RankSteps]) -> list[control_pb2.RankSteps]:
    """Return the ranks of a run that are there; all of them once the run has ended."""
    return [message for message in messages if message.status.connected] or list(messages)


def runs(messages: Iterable[control_pb2.RankSteps]) -> list[RunView]:
    """Return a view of each run, by name."""
    by_run: dict[str, list[control_pb2.RankSteps]] = {}
    for message in map(steady, messages):
        by_run.setdefault(message.status.identity.run, []).append(message)
    return [_run(run, by_run[run]) for run in sorted(by_run)]


def run_dict(view: RunView) -> dict[str, Any]:
    """Return a run as the versioned documents have it."""
    return {
        "run": view.run,
        "job_name": view.job_name,
        "world_size": view.world_size,
        "waits_measured": view.waits and not view.hidden,
        "timed_on": "device" if view.on_device else "host",
        "step_seconds": view.step_seconds,
        "ranks": [_rank_dict(rank) for rank in view.ranks],
    }


def _run(run: str, messages: Sequence[control_pb2.RankSteps]) -> RunView:
    # A rank that has left does nothing that others could wait for.
    there = [message for message in present(messages) if message.count]
    times = comparison_from_messages(there)
    waits = len(times.works) > 1 and any(spent(each, WAIT) for each in times.works)
    slow = find_stragglers(times.works) if waits and not times.hidden else []
    own = {} if times.hidden else {each.rank: (each.stage, each.own_seconds) for each in times.works}
    works = {each.rank: each for each in times.works}
    behind = {each.rank: each for each in slow}
    peers = _Peers(own.values())
    identity = messages[0].status.identity
    return RunView(
        run,
        identity.job_name,
        max(message.status.identity.world_size for message in messages),
        waits,
        times.on_device,
        times.hidden,
        tuple(_rank(message, works, own, peers, behind, on_device=times.on_device) for message in messages),
    )


class _Peers:
    """The own work of a run's ranks, by pipeline stage."""

    def __init__(self, own: Iterable[tuple[int | None, float]]) -> None:
        stages: dict[int | None, list[float]] = {}
        for stage, seconds in own:
            stages.setdefault(stage, []).append(seconds)
        self._sorted = {stage: sorted(each) for stage, each in stages.items()}

    def usual(self, stage: int | None, seconds: float) -> tuple[int, float]:
        """Return how many peers a rank has, and their median; 0 without any.

        Args:
            stage: The rank's stage.
            seconds: Its own work, which is not its peers'.
        """
        all_of_stage = self._sorted.get(stage, [])
        count = len(all_of_stage) - 1
        if count < 1:
            return 0, 0.0
        place = bisect.bisect_left(all_of_stage, seconds)

        def peer(index: int) -> float:
            return all_of_stage[index if index < place else index + 1]

        return count, (peer((count - 1) // 2) + peer(count // 2)) / 2


def _rank(
    message: control_pb2.RankSteps,
    works: Mapping[int, RankWork],
    own: dict[int, tuple[int | None, float]],
    peers: _Peers,
    slow: Mapping[int, Straggler],
    *,
    on_device: bool,
) -> RankView:
    status = message.status
    number = status.identity.rank
    # A rank that has left is not compared.
    shown = works.get(number) or (device_work_from_message(message) if on_device else None)
    phases = (shown or rank_work_from_message(message)).phase_seconds
    # Times on a device are means of other steps than the newest ones, which may be longer or shorter.
    durations = np.frombuffer(message.duration_ns, "<i8")
    step = shown.step_seconds if shown is not None and shown.are_means else mean_of(durations) / 1e9
    stage, seconds = own.get(number, (None, 0.0))
    count, usual = peers.usual(stage, seconds) if number in own else (0, 0.0)
    # The only peer of the faster of two may be the slow one, so its lead means nothing.
    compared = usual > 0 and (count > 1 or seconds >= usual)
    behind = seconds - usual if compared else None
    return rank_view(
        status,
        window=message.count * max(1, message.block_steps),
        step_seconds=step,
        phase_seconds={name: mean_of(column) for name, column in phases.items() if len(column)},
        behind_seconds=behind,
        behind_ratio=behind / usual if behind is not None else None,
        slow=slow.get(number),
    )


def _rank_dict(rank: RankView) -> dict[str, Any]:
    more = {
        "stalled_seconds": rank.stalled_seconds or None,
        "window_steps": rank.window,
        "own_seconds": rank.own_seconds,
        "slow": None if rank.slow is None else to_document(rank.slow, without=("rank",)),
    }
    own = to_document(rank) | more
    return {name: own[name] for name in _RANK_FIELDS}


def run_status_dict(run: control_pb2.Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "job_name": run.job_name,
        "world_size": run.world_size,
        "ranks": [
            {
                "rank": rank.identity.rank,
                "local_rank": rank.identity.local_rank,
                "node": rank.identity.node,
                "pid": rank.identity.pid,
                "script": rank.identity.script,
                "state": rank_state(rank) if rank.connected else reported_state(rank),
                "stalled_seconds": rank.stalled_seconds or None,
                "connected": rank.connected,
                "steps": rank.steps,
                "step_seconds": rank.step_seconds,
                "phase_seconds": dict(rank.phase_seconds),
                "last_step_unix_seconds": rank.last_step_unix_seconds or None,
                "dropped_steps": rank.dropped_steps,
            }
            for rank in run.ranks
        ],
    }


def steps_dict(steps: control_pb2.RankSteps) -> dict[str, Any]:
    """Return the document: one value per step in each column, the oldest step first."""
    identity = steps.status.identity
    return {
        "schema": "torchperfd.steps/1",
        "run": identity.run,
        "rank": identity.rank,
        "node": identity.node,
        "first_step": steps.first_step,
        "end_unix_seconds": (np.frombuffer(steps.end_ns, "<i8") / 1e9).tolist(),
        "step_seconds": (np.frombuffer(steps.duration_ns, "<i8") / 1e9).tolist(),
        "phase_seconds": {
            name: column.tolist() for name, column in rank_work_from_message(steps).phase_seconds.items()
        },
    }
