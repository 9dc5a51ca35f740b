"""Rules and schedules of the captures that the daemon starts by itself, as its configuration has them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from torchperfd_daemon.captures.manifest import CaptureOptions

PER_DAY: Final = 50
"""Default limit of the actions of all rules together per day."""

SEVERE_XIDS: Final = (48, 62, 64, 74, 79, 95, 119, 120)
"""Errors of the GPU itself; 13, 31 and 43 are errors of applications."""

_GLANCE: Final = CaptureOptions(steps=1)


class When(Enum):
    """The condition of a rule."""

    STEP_TIME_REGRESSION = "step-time-regression"
    STRAGGLER = "straggler"
    GPU_UTILISATION_DROP = "gpu-utilisation-drop"
    STALL = "stall"
    XID = "xid"
    GPU_MEMORY_NEAR_FULL = "gpu-memory-near-full"
    METRIC = "metric"


class Action(Enum):
    """The action of a rule."""

    CAPTURE = "capture"
    STACKS = "stacks"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition and an action.

    Attributes:
        above: Upper bound: a ratio, or a metric's value; None without one.
        below: Lower bound, likewise.
        hold_seconds: How long the condition must hold.
        metric: The name of a metric; ``labels`` are those that its series must have.
        cooldown_seconds: The least time between two actions on the same run.
        per_day: The largest number of actions per day (UTC).
    """

    name: str
    when: When
    action: Action = Action.CAPTURE
    above: float | None = None
    below: float | None = None
    hold_seconds: float = 0.0
    metric: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    xids: tuple[int, ...] = SEVERE_XIDS
    options: CaptureOptions = field(default_factory=CaptureOptions)
    cooldown_seconds: float = 1800.0
    per_day: int = 10


@dataclass(frozen=True, slots=True)
class Schedule:
    """Scheduled captures: one step of one rank per interval, round robin over the ranks.

    Attributes:
        every_seconds: The time between two captures.
        overhead: The share of training time that the captures may cost; above it, they become rarer.
    """

    name: str
    every_seconds: float
    overhead: float = 0.001
    options: CaptureOptions = _GLANCE


@dataclass(frozen=True, slots=True)
class Plan:
    """All triggers; ``per_day`` bounds the actions of all rules together."""

    rules: tuple[Rule, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    per_day: int = PER_DAY
