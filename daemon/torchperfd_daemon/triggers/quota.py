"""The quota of triggers: whether a rule may act now, and counts of the results."""

from collections.abc import Callable
from enum import Enum
from typing import Final

from torchperfd_daemon.triggers.rules import Plan, Rule

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
        """Count the result of a trigger."""
        self._counts[name, result] += 1

    def _reset_on_new_day(self) -> None:
        day = int(self._wall() // _DAY_S)
        if day != self._day:
            self._day = day
            self._actions_today.clear()
