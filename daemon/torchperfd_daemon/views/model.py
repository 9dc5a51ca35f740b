"""Runs and their ranks as commands and pages show them: types, texts of states, lists of ranks, names.

Without numpy: `top` opens before that is imported, with a view of what the daemon has computed.
"""

import functools
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchperfd.model.host_memory import HostMemory
from torchperfd.model.messages import unpack
from torchperfd.model.totals import StatusTotals
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.store.model import MIN_PRESENT_STEPS, PRESENT_S, State, coordinates_text, ended_within

if TYPE_CHECKING:
    from torchperfd_daemon.diagnosis.detect.straggler import Straggler
    from torchperfd_daemon.store.store import Rank

WAIT: Final = "collective_wait"
STALLED: Final = "stalled"
STOPPED: Final = "stopped"
_MIN_FACTOR: Final = 6.0
_ORDER: Final = ("data", "h2d", "forward", "loss", "backward", "optimizer", "zero_grad", "checkpoint")


@dataclass(slots=True)  # Of thousands of ranks, frozen ones take four times as long to make.
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
    slow: "Straggler | None"
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


def rank_state(rank: "Rank | control_pb2.RankStatus") -> str:
    """Return a rank's state for people: as it reported, unless it has left or its run hangs."""
    if not rank.connected:
        return "gone"
    if rank.stopped:
        return STOPPED
    return STALLED if rank.stalled_seconds else reported_state(rank)


def reported_state(rank: "Rank | control_pb2.RankStatus") -> str:
    """Return a rank's state as it reported, whatever happened to its process or run since."""
    if isinstance(rank.state, State):
        return rank.state.value
    return _state_name(rank.state)


@functools.cache
def _state_name(state: session_pb2.RunState.ValueType) -> str:
    return session_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()


def gpu_order(gpu: str) -> list[int]:
    """Return what sorts ``0:2`` behind ``0:1`` and ``10`` behind ``9``."""
    return [int(part) if part.isdigit() else 0 for part in gpu.split(":")]


def steady(message: control_pb2.RankSteps) -> control_pb2.RankSteps:
    """Return a rank's steps less the run's first one, once another has followed: it is part of no mean."""
    # Blocks are made without it.
    if message.first_step or message.count < 2 or message.block_steps:
        return message
    return _newest(message, message.count - 1)


def of_the_present(message: control_pb2.RankSteps) -> control_pb2.RankSteps:
    """Return those of a rank's steps that every view of the present is about, as the daemon counts them."""
    if message.block_steps or not message.status.connected or not message.count:
        return message
    within = ended_within(array("q", message.end_ns), PRESENT_S)
    return _newest(message, min(message.count, max(within, MIN_PRESENT_STEPS)))


def _newest(message: control_pb2.RankSteps, count: int) -> control_pb2.RankSteps:
    """Return a rank's newest steps, so many of them."""
    left_out = message.count - count
    if not left_out:
        return message
    rest = control_pb2.RankSteps()
    rest.CopyFrom(message)
    rest.first_step, rest.count = message.first_step + left_out, count
    rest.end_ns, rest.duration_ns = message.end_ns[8 * left_out :], message.duration_ns[8 * left_out :]
    for column in rest.phases:
        column.ns = column.ns[8 * left_out :]
    return rest


def first_runs(messages: Iterable[control_pb2.RankSteps]) -> list[RunView]:
    """Return a view of each run, by name, from the means that the daemon has made: ranks are not compared."""
    by_run: dict[str, list[control_pb2.RankStatus]] = {}
    for message in messages:
        by_run.setdefault(message.status.identity.run, []).append(message.status)
    return [_first_run(run, by_run[run]) for run in sorted(by_run)]


def _first_run(run: str, ranks: Sequence[control_pb2.RankStatus]) -> RunView:
    identity = ranks[0].identity
    return RunView(
        run,
        identity.job_name,
        max(rank.identity.world_size for rank in ranks),
        waits=any(rank.phase_seconds.get(WAIT, 0.0) > 0 for rank in ranks),
        on_device=False,
        hidden=False,
        ranks=tuple(map(first_rank, ranks)),
    )


def first_rank(status: control_pb2.RankStatus) -> RankView:
    """Return a view of a rank from the daemon's means of all its steps."""
    means = dict(status.phase_seconds)
    return rank_view(status, window=status.steps, step_seconds=status.step_seconds, phase_seconds=means)


def rank_view(
    status: control_pb2.RankStatus,
    *,
    window: int,
    step_seconds: float,
    phase_seconds: dict[str, float],
    behind_seconds: float | None = None,
    behind_ratio: float | None = None,
    slow: "Straggler | None" = None,
) -> RankView:
    """Return a view of a rank with these times, and what else its status has."""
    # Of thousands of ranks, most have none of what takes long to unpack.
    coordinates, host_memory = "", None
    if status.coordinates or status.HasField("host_memory"):
        totals = unpack(status, StatusTotals)
        coordinates, host_memory = coordinates_text(totals.coordinates), totals.host_memory
    identity = status.identity
    return RankView(
        rank=identity.rank,
        node=identity.node,
        pid=identity.pid,
        state=rank_state(status),
        stalled_seconds=status.stalled_seconds,
        coordinates=coordinates,
        steps=status.steps,
        window=window,
        step_seconds=step_seconds,
        phase_seconds=phase_seconds,
        behind_seconds=behind_seconds,
        behind_ratio=behind_ratio,
        slow=slow,
        host_memory=host_memory,
    )


def capture_state(state: int) -> str:
    """Return the name of a capture's state in a message, as manifests have it."""
    name = control_pb2.CaptureState.Name(control_pb2.CaptureState.ValueType(state))
    return name.removeprefix("CAPTURE_STATE_").lower()


Answer = control_pb2.ListRunsResponse | control_pb2.GetStepsResponse | control_pb2.DiagnoseResponse
"""Of a daemon, which may have asked others."""

_RANKS: Final = re.compile(r"0*(\d{1,9})(?:-0*(\d{1,9}))?", re.ASCII)


def parse_ranks(text: str, most: int = 100_000) -> list[int]:
    """Return the ranks that a list such as ``0,8-15`` names, in order; none for an empty one.

    Raises:
        UsageError: It is no such list, or names too many.
    """
    ranks: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        match = _RANKS.fullmatch(part)
        first, final = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if final < first:
            raise UsageError(f"{part[:40]!r} is no rank or range of ranks", "write them like 0,8-15")
        ranks.update(range(first, min(final, first + most) + 1))
        if len(ranks) > most:
            raise UsageError(f"these are more than {most:,} ranks", "leave them out for all")
    return sorted(ranks)


_MAX_NAMED: Final = 8


def whole_name(given: str, names: Iterable[str], what: str) -> str:
    """Return the only name with a prefix; the prefix itself where there is none, or where it is empty.

    Raises:
        NoSuchTargetError: Several have the prefix, and none is equal to it.
    """
    known = set(names)
    found = sorted(name for name in known if name.startswith(given))
    if not given or given in known or not found:
        return given
    if len(found) > 1:
        some = ", ".join(found[:_MAX_NAMED])
        raise NoSuchTargetError(f"{len(found)} {what}s begin with {given[:80]}: {some}", "write more of one")
    return found[0]
