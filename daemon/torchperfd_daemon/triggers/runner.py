"""The runner: looks once a second, and acts on what holds."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import Metric

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures import CaptureRecord, CaptureState, Catalog, Query
from torchperfd_daemon.captures.queue import BusyError
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.store import Rank, Store
from torchperfd_daemon.triggers.actions import Actions, timeout_of
from torchperfd_daemon.triggers.conditions import Finding, condition_of
from torchperfd_daemon.triggers.glance import SETTLE_S, Meter, Turns
from torchperfd_daemon.triggers.quota import Result, TriggerCounts, TriggerQuota
from torchperfd_daemon.triggers.rules import Action, Plan, Rule, When
from torchperfd_daemon.triggers.scene import FindingsOf, Scene

log = logging.getLogger("torchperfd.triggers")

INTERVAL_S: Final = 1.0
_FORGOTTEN_S: Final = 10.0
_MOST_CULPRITS: Final = 2


@dataclass(slots=True)
class _Episode:
    """A finding for as long as it holds, and gaps of ten seconds.

    Attributes:
        since: When it began to hold without a gap; None in a gap.
        seen: When it held last.
        said: What became of it, as far as it was counted.
        settled: Nothing more is done about it.
    """

    since: float | None
    seen: float
    said: Result | None = None
    settled: bool = False


class _Watch:
    """One rule: its condition, and what holds of it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._condition = condition_of(rule)
        self._episodes: dict[str, _Episode] = {}

    def due(self, scene: Scene) -> list[tuple[Finding, _Episode]]:
        """Return what has held for long enough and is not settled."""
        found = {finding.key: finding for finding in self._condition.look(scene)}
        now = scene.now
        for key, episode in list(self._episodes.items()):
            if key not in found:
                episode.since = None
                if now - episode.seen > _FORGOTTEN_S:
                    del self._episodes[key]
        due = []
        for key, finding in found.items():
            episode = self._episodes.setdefault(key, _Episode(now, now))
            episode.since = now if episode.since is None else episode.since
            episode.seen = now
            if not episode.settled and now - episode.since >= self._hold():
                due.append((finding, episode))
        return due

    def _hold(self) -> float:
        # A stall has held for as long as it takes to be one.
        return 0.0 if self.rule.when is When.STALL else self.rule.hold_seconds


class Runner:
    """Carries out a plan.

    Args:
        plan: What to do when.
        store: Where ranks and their steps are.
        found: Returns what diagnosis has found of a run.
        page: Returns what the metrics page would show now; asked only where a rule needs it.
        actions: What can be done.
        clock: Monotonic seconds.
        wall: Unix seconds.
        counts: Where to count what becomes of triggers.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        found: FindingsOf,
        page: Callable[[], Iterable[Metric]],
        actions: Actions,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        counts: TriggerCounts | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._plan = plan
        self._store = store
        self._found = found
        self._page = page
        self._actions = actions
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._desk = TriggerQuota(plan, clock, wall, counts)
        self._watches = [_Watch(rule) for rule in plan.rules]
        self._turns = [Turns(schedule, clock()) for schedule in plan.schedules]
        self._tasks = set[asyncio.Task[None]]()
        self._broken = set[str]()
        self.health = WorkerHealth("triggers")

    async def run(self, catalog: Catalog) -> None:
        """Look once a second until cancelled; what was begun is cancelled, too.

        Args:
            catalog: Tells what a daemon before this one did today.
        """
        if not self.has_work:
            return
        try:
            await self._remember(catalog)
            while True:
                await self._sleep(INTERVAL_S)
                try:
                    self.look()
                    self.health.succeeded(self._wall())
                except Exception:
                    if self.health.failed():
                        log.exception("triggers cannot be looked at")
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def has_work(self) -> bool:
        """Whether the plan has rules or schedules."""
        return bool(self._watches or self._turns)

    def look(self) -> None:
        """Look at everything once, and begin what is due."""
        now = self._clock()
        scene = Scene(now, self._runs(), self._found, self._page)
        for watch in self._watches:
            try:
                due = watch.due(scene)
            except Exception:
                # A rule that cannot be looked at costs itself only, and says so once.
                self.health.failed()
                if watch.rule.name not in self._broken:
                    self._broken.add(watch.rule.name)
                    log.exception("trigger %s cannot be looked at", watch.rule.name)
                continue
            for finding, episode in due:
                self._consider(watch.rule, finding, episode)
        for turns in self._turns:
            self._consider_glance(turns, now)

    def _consider(self, rule: Rule, finding: Finding, episode: _Episode) -> None:
        if not finding.run:
            episode.settled = True
            self._say(
                rule.name, Result.FAILED, f"{finding.reason}; there is no run to act on", logging.WARNING
            )
            return
        refused = self._desk.admit(rule, finding.run)
        if refused is None:
            episode.settled = True
            self._begin(self._act(rule, finding, episode))
        elif refused is not episode.said:
            episode.said = refused
            self._say(rule.name, refused, finding.reason)

    async def _act(self, rule: Rule, finding: Finding, episode: _Episode) -> None:
        log.info("trigger %s: %s", rule.name, finding.reason)
        try:
            if rule.action is Action.STACKS:
                record = await self._actions.stacks(rule.name, finding.run)
            else:
                here = self._runs().get(finding.run, [])
                ranks = with_a_peer(finding.ranks, here)
                usual = max((rank.mean_step_seconds() for rank in here), default=0.0)
                timeout = timeout_of(rule.options, usual)
                record = await self._actions.capture(rule.name, finding.run, ranks, rule.options, timeout)
        except BusyError as error:
            self._desk.give_back(rule, finding.run)
            episode.settled = False
            if episode.said is not Result.BUSY:
                episode.said = Result.BUSY
                self._say(rule.name, Result.BUSY, str(error))
        except TorchperfdError as error:
            self._say(rule.name, Result.FAILED, str(error), logging.WARNING)
        else:
            self._say_end(rule.name, record)

    def _consider_glance(self, turns: Turns, now: float) -> None:
        if not turns.due(now):
            return
        name = turns.schedule.name
        rank = turns.next(rank for ranks in self._runs().values() for rank in ranks)
        if rank is None:
            return
        if not turns.affordable(now):
            self._say(name, Result.BUDGET, "the last glance has cost too much for another one yet")
            return
        self._begin(self._glance(turns, rank, now))

    async def _glance(self, turns: Turns, rank: Rank, began: float) -> None:
        schedule, identity = turns.schedule, rank.identity
        meter = Meter(rank)
        try:
            record = await self._actions.capture(
                schedule.name,
                identity.run,
                (identity.rank,),
                schedule.options,
                timeout_of(schedule.options, rank.mean_step_seconds()),
            )
        except BusyError as error:
            self._say(schedule.name, Result.BUSY, str(error))
            return
        except TorchperfdError as error:
            self._say(schedule.name, Result.FAILED, str(error), logging.WARNING)
            return
        await self._sleep(SETTLE_S)
        cost = meter.seconds()
        turns.paid(began, cost)
        self._say_end(schedule.name, record, f" of rank {identity.rank}, which cost it {cost * 1e3:.0f} ms")

    def _runs(self) -> dict[str, list[Rank]]:
        """Return the connected ranks of each run."""
        here = {run: [rank for rank in ranks if rank.connected] for run, ranks in self._store.runs().items()}
        return {run: ranks for run, ranks in here.items() if ranks}

    def _say_end(self, name: str, record: CaptureRecord, more: str = "") -> None:
        failed = record.state is CaptureState.FAILED
        reason = f": {record.reason}" if record.reason else ""
        words = f"capture {record.capture_id}{more} is {record.state.value}{reason}"
        self._say(name, Result.FAILED if failed else Result.FIRED, words)

    def _say(self, name: str, result: Result, words: str, level: int = logging.INFO) -> None:
        self._desk.count(name, result)
        log.log(level, "trigger %s %s: %s", name, result.value, words)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a trigger's action broke off", exc_info=task.exception())

    async def _remember(self, catalog: Catalog) -> None:
        """Take note of what was done before a restart, so that it does not renew budgets."""
        rules = {rule.name: rule for rule in self._plan.rules}
        if not rules:
            return
        longest = max(86400.0, *(rule.cooldown_seconds for rule in rules.values()))
        query = Query(since=max(0.0, self._wall() - longest))
        try:
            listing = await asyncio.to_thread(catalog.list, query)
        except Exception:
            log.warning("cannot read what triggers did before", exc_info=True)
            return
        for listed in listing.captures:
            rule = rules.get(listed.record.trigger)
            if rule is not None:
                self._desk.remember(rule, listed.record.run, listed.record.requested_at)


def with_a_peer(culprits: tuple[int, ...], ranks: Sequence[Rank]) -> list[int]:
    """Return the ranks to capture: two culprits at most, and of the others the one of median own work."""
    chosen = list(culprits[:_MOST_CULPRITS])
    others = [rank for rank in ranks if rank.identity.rank not in culprits and rank.history.seen]
    if others:
        others.sort(key=Rank.mean_own_seconds)
        chosen.append(others[(len(others) - 1) // 2].identity.rank)
    return chosen
