"""The desk: whether a rule may act now, and what has become of those that asked."""

from collections.abc import Callable
from enum import Enum
from typing import Final

from torchperfd_daemon.triggers.rules import Plan, Rule

_DAY_S: Final = 86400.0


class Result(Enum):
    """What has become of a trigger."""

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
        plan: Whose triggers are counted.
        clock: Monotonic seconds.
        wall: Unix seconds.
        counts: Where to count; for the metrics page.
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
        self._acted: dict[str, int] = {}
        self._cold_until: dict[tuple[str, str], float] = {}
        self._counts = {} if counts is None else counts
        # From 0 on, so that a first one is an increase.
        names = [rule.name for rule in plan.rules] + [schedule.name for schedule in plan.schedules]
        self._counts.update({(name, result): 0 for name in names for result in Result})

    def admit(self, rule: Rule, run: str) -> Result | None:
        """Return None when the rule may act on the run now, and take note of it; else why not."""
        now = self._clock()
        self._turn_the_day()
        self._cold_until = {key: until for key, until in self._cold_until.items() if until > now}
        if (rule.name, run) in self._cold_until:
            return Result.COOLDOWN
        if self._acted.get(rule.name, 0) >= rule.per_day or sum(self._acted.values()) >= self._per_day:
            return Result.BUDGET
        self._acted[rule.name] = self._acted.get(rule.name, 0) + 1
        self._cold_until[rule.name, run] = now + rule.cooldown_seconds
        return None

    def give_back(self, rule: Rule, run: str) -> None:
        """Undo ``admit``: the rule could not act."""
        self._acted[rule.name] = max(0, self._acted.get(rule.name, 0) - 1)
        self._cold_until.pop((rule.name, run), None)

    def remember(self, rule: Rule, run: str, at: float) -> None:
        """Take note of what the daemon before this one did: an action at a Unix time."""
        self._turn_the_day()
        if int(at // _DAY_S) == self._day:
            self._acted[rule.name] = self._acted.get(rule.name, 0) + 1
        until = self._clock() + rule.cooldown_seconds - (self._wall() - at)
        key = rule.name, run
        self._cold_until[key] = max(until, self._cold_until.get(key, until))

    def count(self, name: str, result: Result) -> None:
        """Count what has become of a trigger."""
        self._counts[name, result] += 1

    def _turn_the_day(self) -> None:
        day = int(self._wall() // _DAY_S)
        if day != self._day:
            self._day = day
            self._acted.clear()
