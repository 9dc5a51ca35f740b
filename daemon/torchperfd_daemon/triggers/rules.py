"""The actions of rules and schedules, and how often these may act.

An action is an ordinary capture, or stacks that are written like a capture.
"""

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from enum import Enum
from pathlib import Path
from typing import Final

from torchperfd._version import __version__
from torchperfd.document.terminal import render
from torchperfd.v1.contract import new_capture_id
from torchperfd_daemon.captures import folder as capture_folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import (
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankTrace,
    first_reason,
    overall_state,
)
from torchperfd_daemon.captures.rank_attempts import Participant
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, explained
from torchperfd_daemon.stacks.merge import merge
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.stacks.report import stacks_document, to_dict
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.triggers.plan import Plan, Rule, Schedule

_DAY_S: Final = 86400.0


class Result(Enum):
    """The result of a trigger."""

    FIRED = "fired"
    COOLDOWN = "cooldown"
    BUDGET = "budget"
    BUSY = "busy"
    FAILED = "failed"


TriggerCounts = dict[tuple[str, Result], int]
"""Triggers by name and result."""


class TriggerQuota:
    """Cooldowns and daily budgets. A day begins at midnight UTC.

    Args:
        clock: Monotonic seconds.
        wall: Unix seconds.
    """

    def __init__(
        self,
        plan: Plan,
        clock: Callable[[], float],
        wall: Callable[[], float],
        counts: "TriggerCounts | None" = None,
    ) -> None:
        self._per_day = plan.per_day
        self._clock = clock
        self._wall = wall
        self._day = -1
        self._actions_today: dict[str, int] = {}
        self._cold_until: dict[tuple[str, str], float] = {}
        self._counts = {} if counts is None else counts
        # Counters start at 0, so that the first event is an increase.
        names = [rule.name for rule in plan.rules] + [schedule.name for schedule in plan.schedules]
        self._counts.update({(name, result): 0 for name in names for result in Result})

    def admit(self, rule: Rule, run: str) -> Result | None:
        """Return None and record the action if the rule may act on the run now; otherwise return why not."""
        now = self._clock()
        self._reset_on_new_day()
        self._cold_until = {key: until for key, until in self._cold_until.items() if until > now}
        if (rule.name, run) in self._cold_until:
            return Result.COOLDOWN
        if (
            self._actions_today.get(rule.name, 0) >= rule.per_day
            or sum(self._actions_today.values()) >= self._per_day
        ):
            return Result.BUDGET
        self._actions_today[rule.name] = self._actions_today.get(rule.name, 0) + 1
        self._cold_until[rule.name, run] = now + rule.cooldown_seconds
        return None

    def give_back(self, rule: Rule, run: str) -> None:
        """Undo ``admit`` for a rule that could not act."""
        self._actions_today[rule.name] = max(0, self._actions_today.get(rule.name, 0) - 1)
        self._cold_until.pop((rule.name, run), None)

    def remember(self, rule: Rule, run: str, at: float) -> None:
        """Record an action of an earlier daemon process at a Unix time."""
        self._reset_on_new_day()
        if int(at // _DAY_S) == self._day:
            self._actions_today[rule.name] = self._actions_today.get(rule.name, 0) + 1
        until = self._clock() + rule.cooldown_seconds - (self._wall() - at)
        key = rule.name, run
        self._cold_until[key] = max(until, self._cold_until.get(key, until))

    def count(self, name: str, result: Result) -> None:
        self._counts[name, result] += 1

    def _reset_on_new_day(self) -> None:
        day = int(self._wall() // _DAY_S)
        if day != self._day:
            self._day = day
            self._actions_today.clear()


SETTLE_S: Final = 3.0
"""The delay before the cost is measured: the trace has to be written, and reports come once a second."""


class CostMeter:
    """Measures the cost of a capture: the time of a rank's steps beyond the usual time of as many steps."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._usual = rank.mean_step_seconds()
        self._steps, self._ns = self._made()

    def seconds(self) -> float:
        """Return the cost so far, in seconds."""
        steps, ns = self._made()
        return max(0.0, (ns - self._ns) / 1e9 - (steps - self._steps) * self._usual)

    def _made(self) -> tuple[int, int]:
        train = self._rank.totals.train
        return train.steps, train.ns


class ScheduleState:
    """The state of a schedule: when its next capture is due, and at which rank.

    Args:
        now: Monotonic seconds; the first capture is one interval later.
    """

    def __init__(self, schedule: Schedule, now: float) -> None:
        self.schedule = schedule
        self._due_at = now + schedule.every_seconds
        self._within_overhead_at = now
        self._last: tuple[str, int] | None = None

    def due(self, now: float) -> bool:
        """Return whether an interval is over; if so, begin the next one."""
        if now < self._due_at:
            return False
        self._due_at = now + self.schedule.every_seconds
        return True

    def is_within_overhead(self, now: float) -> bool:
        """Return whether the cost of the last capture, spread over the time since, is within the overhead."""
        return now >= self._within_overhead_at

    def next(self, ranks: Iterable[Rank]) -> Rank | None:
        """Return the training rank after the last one; None if no rank trains."""
        training = {
            (rank.identity.run, rank.identity.rank): rank
            for rank in ranks
            if rank.state is State.TRAINING and rank.history.seen
        }
        if not training:
            return None
        keys = sorted(training)
        later = [key for key in keys if self._last is not None and key > self._last]
        self._last = (later or keys)[0]
        return training[self._last]

    def add_cost(self, began: float, seconds: float) -> None:
        """Record the cost of a capture.

        Args:
            began: When it began; monotonic seconds.
        """
        self._within_overhead_at = began + seconds / self.schedule.overhead


TEXT_FILE: Final = "stacks.txt"
JSON_FILE: Final = "stacks.json"
_STACKS_S: Final = 10.0


class Actions:
    """Carries out the actions of rules.

    Args:
        participants: Returns the connected ranks of a run.
        stacks: Yields the stacks of a run's ranks, waiting up to so many seconds for each.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        catalog: Catalog,
        participants: Callable[[str], Sequence[Participant]],
        stacks: Callable[[str, float], AsyncIterator[RankStacks]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._coordinator = coordinator
        self._catalog = catalog
        self._participants = participants
        self._stacks = stacks
        self._wall = wall

    async def capture(
        self, trigger: str, run: str, ranks: Collection[int], options: CaptureOptions, timeout: float
    ) -> CaptureRecord:
        """Capture some ranks of a run, and return the record of the capture.

        Raises:
            BusyError: A capture of the run is in progress.
            TorchperfdError: None of the ranks is connected, or nothing can be written.
        """
        chosen = [each for each in self._participants(run) if each.rank in ranks]
        if not chosen:
            raise NoSuchTargetError(f"no chosen rank of run {run} is connected")
        stream = self._coordinator.capture(run, chosen, options, timeout, trigger=trigger)
        record: CaptureRecord | None = None
        async with aclosing(stream) as changes:  # type: ignore[type-var] # an async generator is what it is
            async for progress in changes:
                record = progress.record
        if record is None:
            raise TorchperfdError("the capture ended without a result")
        return record

    async def stacks(self, trigger: str, run: str) -> CaptureRecord:
        """Write the stacks of all ranks of a run, and return the record with their manifest.

        Raises:
            TorchperfdError: The run has no ranks here, or nothing can be written.
        """
        asked_at = self._wall()
        stacks = [rank async for rank in self._stacks(run, _STACKS_S)]
        if not stacks:
            raise NoSuchTargetError(f"no rank of run {run} is on this node")
        stacks.sort(key=lambda rank: rank.rank)
        record = self._record(trigger, run, asked_at, stacks)
        merged = merge(stacks)
        text = f"{render(stacks_document(run, stacks, merged))}\n"
        document = json.dumps(to_dict(run, stacks, merged, ())).encode() + b"\n"
        path = self._catalog.create(record.capture_id)
        _write(path, {TEXT_FILE: text.encode(errors="replace"), JSON_FILE: document})
        # One file contains all ranks. It is listed once, so that sums over ranks are right.
        first = next((trace for trace in record.ranks if trace.state is CaptureState.COMPLETE), None)
        if first is not None:
            first.file, first.bytes = JSON_FILE, len(document)
            first.sha256 = hashlib.sha256(document).hexdigest()
        record.ended_at = self._wall()
        self._catalog.save(record)
        self._coordinator.counts.count(record, record.ended_at)
        return record

    def _record(self, trigger: str, run: str, asked_at: float, stacks: Sequence[RankStacks]) -> CaptureRecord:
        ranks = [
            RankTrace(
                rank.rank,
                CaptureState.COMPLETE if rank.outcome.has_stacks else CaptureState.FAILED,
                "" if rank.outcome.has_stacks else f"{rank.outcome.value}: {rank.reason}",
                node=rank.node,
                pid=rank.pid,
            )
            for rank in stacks
        ]
        return CaptureRecord(
            capture_id=new_capture_id(asked_at),
            run=run,
            trigger=trigger,
            requested_at=asked_at,
            state=overall_state(ranks),
            reason=first_reason(ranks),
            options=CaptureOptions(steps=0),
            ranks=ranks,
            world_size=max(rank.world_size for rank in stacks),
            daemon_version=__version__,
        )


def _write(path: Path, files: dict[str, bytes]) -> None:
    """Create files in a capture's folder, never through an existing name, since other users may write there.

    Raises:
        TorchperfdError: They cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with explained(f"cannot write to {path}", "look at its disk"), capture_folder.opened(path) as held:
        for name, content in files.items():
            with open(os.open(name, flags, 0o644, dir_fd=held), "wb") as file:  # noqa: PTH123
                file.write(content)


def timeout_of(options: CaptureOptions, step_seconds: float) -> float:
    """Return the timeout of a capture in seconds: 60 plus three times the expected time of its steps."""
    return 60.0 + 3.0 * (options.steps + 2) * step_seconds
