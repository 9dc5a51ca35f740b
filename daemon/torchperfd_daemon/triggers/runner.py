"""The runner of triggers: evaluates all rules once a second, and starts the actions that are due."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import Metric

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.attempt import BusyError
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import Query
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.triggers.conditions import ConditionInputs, Finding, FindingsOf, condition_of
from torchperfd_daemon.triggers.plan import Action, Plan, Rule, When
from torchperfd_daemon.triggers.rules import (
    SETTLE_S,
    Actions,
    CostMeter,
    Result,
    ScheduleState,
    TriggerCounts,
    TriggerQuota,
    timeout_of,
)

log = logging.getLogger("torchperfd.triggers")

INTERVAL_S: Final = 1.0
_FORGOTTEN_S: Final = 10.0
_MAX_CULPRITS: Final = 2


@dataclass(slots=True)
class _Episode:
    """A finding while it holds, including gaps of up to ten seconds.

    Attributes:
        since: When it began to hold without a gap; None during a gap.
        seen: When it held last.
        counted: The result that was counted last.
        settled: Whether it needs no further action.
    """

    since: float | None
    seen: float
    counted: Result | None = None
    settled: bool = False


class _Watch:
    """One rule with its condition and its present episodes."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._condition = condition_of(rule)
        self._episodes: dict[str, _Episode] = {}

    def due(self, inputs: ConditionInputs) -> list[tuple[Finding, _Episode]]:
        """Return the findings that have held for long enough and are not settled."""
        found = {finding.key: finding for finding in self._condition.evaluate(inputs)}
        now = inputs.now
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
        # A stall has already held for its limit when diagnosis finds it.
        return 0.0 if self.rule.when is When.STALL else self.rule.hold_seconds


class Runner:
    """Runs the rules and schedules of a plan.

    Args:
        page: Returns the present metrics; called only if a rule needs them.
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
        self._quota = TriggerQuota(plan, clock, wall, counts)
        self._watches = [_Watch(rule) for rule in plan.rules]
        self._schedules = [ScheduleState(schedule, clock()) for schedule in plan.schedules]
        self._tasks = set[asyncio.Task[None]]()
        self._broken = set[str]()
        self.health = WorkerHealth("triggers")

    async def run(self, catalog: Catalog) -> None:
        """Evaluate once a second until cancelled; actions in progress are cancelled too.

        Args:
            catalog: The captures, which show the actions of earlier daemon processes.
        """
        if not self.has_work:
            return
        try:
            await self._remember(catalog)
            while True:
                await self._sleep(INTERVAL_S)
                try:
                    self.evaluate()
                    self.health.succeeded(self._wall())
                except Exception:
                    if self.health.failed():
                        log.exception("evaluating triggers failed; trying again every %.0f s", INTERVAL_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_acting(self) -> bool:
        """Whether an action is in progress."""
        return bool(self._tasks)

    @property
    def has_work(self) -> bool:
        """Whether the plan has rules or schedules."""
        return bool(self._watches or self._schedules)

    def evaluate(self) -> None:
        """Evaluate all rules and schedules once, and start the actions that are due."""
        now = self._clock()
        inputs = ConditionInputs(now, self._runs(), self._found, self._page)
        for watch in self._watches:
            try:
                due = watch.due(inputs)
            except Exception:
                # A failing rule must not stop the others; its error is logged once.
                self.health.failed()
                if watch.rule.name not in self._broken:
                    self._broken.add(watch.rule.name)
                    log.exception(
                        "evaluating trigger %s failed; further failures are not logged", watch.rule.name
                    )
                continue
            for finding, episode in due:
                self._consider(watch.rule, finding, episode)
        for schedule_state in self._schedules:
            self._consider_scheduled_capture(schedule_state, now)

    def _consider(self, rule: Rule, finding: Finding, episode: _Episode) -> None:
        if not finding.run:
            episode.settled = True
            self._count_result(
                rule.name, Result.FAILED, f"{finding.reason}; there is no run to act on", logging.WARNING
            )
            return
        refused = self._quota.admit(rule, finding.run)
        if refused is None:
            episode.settled = True
            self._begin(self._act(rule, finding, episode))
        elif refused is not episode.counted:
            episode.counted = refused
            self._count_result(rule.name, refused, finding.reason)

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
            self._quota.give_back(rule, finding.run)
            episode.settled = False
            if episode.counted is not Result.BUSY:
                episode.counted = Result.BUSY
                self._count_result(rule.name, Result.BUSY, str(error))
        except TorchperfdError as error:
            self._count_result(rule.name, Result.FAILED, str(error), logging.WARNING)
        else:
            self._count_capture(rule.name, record)

    def _consider_scheduled_capture(self, schedule_state: ScheduleState, now: float) -> None:
        if not schedule_state.due(now):
            return
        name = schedule_state.schedule.name
        rank = schedule_state.next(rank for ranks in self._runs().values() for rank in ranks)
        if rank is None:
            return
        if not schedule_state.is_within_overhead(now):
            self._count_result(
                name, Result.BUDGET, "the last capture cost too much; the next one has to wait"
            )
            return
        self._begin(self._scheduled_capture(schedule_state, rank, now))

    async def _scheduled_capture(self, schedule_state: ScheduleState, rank: Rank, began: float) -> None:
        schedule, identity = schedule_state.schedule, rank.identity
        meter = CostMeter(rank)
        try:
            record = await self._actions.capture(
                schedule.name,
                identity.run,
                (identity.rank,),
                schedule.options,
                timeout_of(schedule.options, rank.mean_step_seconds()),
            )
        except BusyError as error:
            self._count_result(schedule.name, Result.BUSY, str(error))
            return
        except TorchperfdError as error:
            self._count_result(schedule.name, Result.FAILED, str(error), logging.WARNING)
            return
        await self._sleep(SETTLE_S)
        cost = meter.seconds()
        schedule_state.add_cost(began, cost)
        self._count_capture(
            schedule.name, record, f" of rank {identity.rank}, which cost it {cost * 1e3:.0f} ms"
        )

    def _runs(self) -> dict[str, list[Rank]]:
        """Return the connected ranks of each run."""
        here = {run: [rank for rank in ranks if rank.connected] for run, ranks in self._store.runs().items()}
        return {run: ranks for run, ranks in here.items() if ranks}

    def _count_capture(self, name: str, record: CaptureRecord, more: str = "") -> None:
        failed = record.state is CaptureState.FAILED
        reason = f": {record.reason}" if record.reason else ""
        words = f"capture {record.capture_id}{more} is {record.state.value}{reason}"
        self._count_result(name, Result.FAILED if failed else Result.FIRED, words)

    def _count_result(self, name: str, result: Result, words: str, level: int = logging.INFO) -> None:
        self._quota.count(name, result)
        log.log(level, "trigger %s %s: %s", name, result.value, words)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the action of a trigger failed", exc_info=task.exception())

    async def _remember(self, catalog: Catalog) -> None:
        """Record the actions from before a restart, so that a restart does not renew budgets."""
        rules = {rule.name: rule for rule in self._plan.rules}
        if not rules:
            return
        longest = max(86400.0, *(rule.cooldown_seconds for rule in rules.values()))
        query = Query(since=max(0.0, self._wall() - longest))
        try:
            listing = await asyncio.to_thread(catalog.list, query)
        except Exception:
            log.warning("cannot read earlier actions of triggers; budgets start again", exc_info=True)
            return
        for listed in listing.captures:
            rule = rules.get(listed.record.trigger)
            if rule is not None:
                self._quota.remember(rule, listed.record.run, listed.record.requested_at)


def with_a_peer(culprits: tuple[int, ...], ranks: Sequence[Rank]) -> list[int]:
    """Return the ranks to capture: at most two culprits, and the one of the others with median own work."""
    chosen = list(culprits[:_MAX_CULPRITS])
    others = [rank for rank in ranks if rank.identity.rank not in culprits and rank.history.seen]
    if others:
        others.sort(key=Rank.mean_own_seconds)
        chosen.append(others[(len(others) - 1) // 2].identity.rank)
    return chosen
