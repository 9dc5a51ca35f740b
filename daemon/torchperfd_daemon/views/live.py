"""The data that live commands and the live page show of runs, ranks and steps: numbers, and documents."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd.model.documents import to_document
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.messages import unpack
from torchperfd.model.totals import StatusTotals
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis.detect.straggler import RankWork, Straggler, find_stragglers
from torchperfd_daemon.service.translate import (
    comparison_from_messages,
    device_work_from_message,
    rank_work_from_message,
)
from torchperfd_daemon.store.model import coordinates_text
from torchperfd_daemon.store.store import Rank

WAIT: Final = "collective_wait"
STALLED: Final = "stalled"
STOPPED: Final = "stopped"
_MIN_FACTOR: Final = 6.0
_ORDER: Final = ("data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "checkpoint")


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


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank over its newest training steps. Times are means per step in seconds.

    Attributes:
        state: Its state; ``gone`` once its process has left, ``stalled`` or ``stopped`` in a hang.
        stalled_seconds: Of a hang, for how long it has made no step; 0 while its run does not hang.
        coordinates: Its place in each dimension of its job, such as ``pp=1 dp=0``; empty where it has none.
        steps: Training steps made since it has attached.
        window: How many of them the times are of.
        step_seconds: Its step; 0 where it has made none.
        behind_seconds: Own work above the median of its peers, the other ranks of its pipeline stage;
            negative where below; None without a peer, and for the faster of two ranks.
        behind_ratio: The same as a part of the peers' own work.
        slow: Why it counts as a slow rank; None where it does not.
        host_memory: Of its process; None if unknown.
    """

    rank: int
    node: str
    pid: int
    state: str
    stalled_seconds: float
    coordinates: str
    steps: int
    window: int
    step_seconds: float
    phase_seconds: dict[str, float]
    behind_seconds: float | None
    behind_ratio: float | None
    slow: Straggler | None
    host_memory: HostMemory | None = None

    @property
    def own_seconds(self) -> float:
        """The step less the wait for others."""
        return self.step_seconds - self.phase_seconds.get(WAIT, 0.0)


@dataclass(frozen=True, slots=True)
class RunView:
    """One run's ranks, on this node or on all.

    Attributes:
        waits: Whether waiting for others is measured. Only then can slow and waiting ranks be distinguished.
        on_device: Whether phases are times on the devices, because ranks wait for each other there.
        hidden: Whether they wait there in a way that is not measured.
    """

    run: str
    job_name: str
    world_size: int
    waits: bool
    on_device: bool
    hidden: bool
    ranks: tuple[RankView, ...]

    @property
    def step_seconds(self) -> float:
        """The slowest rank's mean step; 0 where none has made one."""
        return max((rank.step_seconds for rank in self.ranks), default=0.0)

    @property
    def here(self) -> int:
        """How many of the ranks have not left."""
        return sum(rank.state != "gone" for rank in self.ranks)

    @property
    def nodes(self) -> set[str]:
        """Where those ranks are; where they were once all have left."""
        here = {rank.node for rank in self.ranks if rank.state != "gone"}
        return here or {rank.node for rank in self.ranks}

    @property
    def phases(self) -> list[str]:
        """The phases that any rank has spent time in, in the order of a step, waiting for others left out."""
        there = {name for rank in self.ranks for name, seconds in rank.phase_seconds.items() if seconds > 0}
        users = sorted(there - {*_ORDER, WAIT, "other"})
        return [name for name in (*_ORDER, *users, "other") if name in there]


def behind_text(ratio: float) -> str:
    """Return how much more own work than its peers a rank has: a percentage, from six times on a factor."""
    return f"{ratio + 1:.0f} times" if ratio >= _MIN_FACTOR - 1 else f"{ratio:+.1%}"


def rank_state(rank: Rank | control_pb2.RankStatus) -> str:
    """Return a rank's state for people: as it reported, unless it has left or its run hangs."""
    if not rank.connected:
        return "gone"
    if rank.stopped:
        return STOPPED
    return STALLED if rank.stalled_seconds else reported_state(rank)


def reported_state(rank: Rank | control_pb2.RankStatus) -> str:
    """Return a rank's state as it reported, whatever happened to its process or run since."""
    if isinstance(rank, Rank):
        return rank.state.value
    return session_pb2.RunState.Name(rank.state).removeprefix("RUN_STATE_").lower()


def spent(own: RankWork, phase: str) -> bool:
    """Return whether a rank has spent any time in a phase."""
    return phase in own.phase_seconds and bool(own.phase_seconds[phase].any())


def present(messages: Sequence[control_pb2.RankSteps]) -> list[control_pb2.RankSteps]:
    """Return the ranks of a run that are there; all of them once the run has ended."""
    return [message for message in messages if message.status.connected] or list(messages)


def steady(message: control_pb2.RankSteps) -> control_pb2.RankSteps:
    """Return a rank's steps less the run's first one, once another has followed: it is part of no mean."""
    # Blocks are made without it.
    if message.first_step or message.count < 2 or message.block_steps:
        return message
    rest = control_pb2.RankSteps()
    rest.CopyFrom(message)
    rest.first_step, rest.count = 1, message.count - 1
    rest.end_ns, rest.duration_ns = message.end_ns[8:], message.duration_ns[8:]
    for column in rest.phases:
        column.ns = column.ns[8:]
    return rest


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
    identity = messages[0].status.identity
    return RunView(
        run,
        identity.job_name,
        max(message.status.identity.world_size for message in messages),
        waits,
        times.on_device,
        times.hidden,
        tuple(_rank(message, own, slow, on_device=times.on_device) for message in messages),
    )


def _rank(
    message: control_pb2.RankSteps,
    own: dict[int, tuple[int | None, float]],
    slow: Sequence[Straggler],
    *,
    on_device: bool,
) -> RankView:
    status = message.status
    own_totals = unpack(status, StatusTotals)
    number = status.identity.rank
    shown = device_work_from_message(message) if on_device else None
    phases = (shown or rank_work_from_message(message)).phase_seconds
    stage, seconds = own.get(number, (None, 0.0))
    peers = [theirs for other, (their, theirs) in own.items() if other != number and their == stage]
    usual = float(np.median(peers)) if peers else 0.0
    # The only peer of the faster of two may be the slow one, so its lead means nothing.
    compared = number in own and usual > 0 and (len(peers) > 1 or seconds >= usual)
    behind = seconds - usual if compared else None
    return RankView(
        rank=number,
        node=status.identity.node,
        pid=status.identity.pid,
        state=rank_state(status),
        stalled_seconds=status.stalled_seconds,
        coordinates=coordinates_text(own_totals.coordinates),
        steps=status.steps,
        window=message.count * max(1, message.block_steps),
        step_seconds=float(np.frombuffer(message.duration_ns, "<i8").mean()) / 1e9 if message.count else 0.0,
        phase_seconds={name: float(column.mean()) for name, column in phases.items() if len(column)},
        behind_seconds=behind,
        behind_ratio=behind / usual if behind is not None else None,
        slow=next((each for each in slow if each.rank == number), None),
        host_memory=own_totals.host_memory,
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
    """Return a run with its ranks."""
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


def gpu_order(gpu: str) -> list[int]:
    """Return what sorts ``0:2`` behind ``0:1`` and ``10`` behind ``9``."""
    return [int(part) if part.isdigit() else 0 for part in gpu.split(":")]
