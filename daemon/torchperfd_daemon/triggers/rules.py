"""Rules and schedules: when the daemon captures by itself."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from torchperfd_daemon.captures.manifest import CaptureOptions

PER_DAY: Final = 50
"""Actions of all rules together in a day, unless the configuration says otherwise."""

GRAVE_XIDS: Final = (48, 62, 64, 74, 79, 95, 119, 120)
"""Errors of the GPU itself; 13, 31 and 43 are those of applications."""

_GLANCE: Final = CaptureOptions(steps=1)


class When(Enum):
    """What a rule waits for."""

    STEP_TIME_REGRESSION = "step-time-regression"
    STRAGGLER = "straggler"
    GPU_UTILISATION_DROP = "gpu-utilisation-drop"
    STALL = "stall"
    XID = "xid"
    GPU_MEMORY_NEAR_FULL = "gpu-memory-near-full"
    METRIC = "metric"


class Action(Enum):
    """What a rule does."""

    CAPTURE = "capture"
    STACKS = "stacks"


@dataclass(frozen=True, slots=True)
class Rule:
    """What to wait for, and what to do then.

    Attributes:
        above: A ratio, or for a metric its value; None when the rule has no upper bound.
        below: Likewise.
        hold_seconds: How long the condition has to hold.
        metric: Name on the metrics page; labels are those that a series must have.
        xids: Numbers of the driver's errors.
        options: Of a capture.
        cooldown_seconds: After it has acted on a run, it does not do so again for so long.
        per_day: How often it acts in a day of UTC.
    """

    name: str
    when: When
    action: Action = Action.CAPTURE
    above: float | None = None
    below: float | None = None
    hold_seconds: float = 0.0
    metric: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    xids: tuple[int, ...] = GRAVE_XIDS
    options: CaptureOptions = field(default_factory=CaptureOptions)
    cooldown_seconds: float = 1800.0
    per_day: int = 10


@dataclass(frozen=True, slots=True)
class Schedule:
    """A glance: one step of one rank in turn, at intervals.

    Attributes:
        every_seconds: Between two glances.
        overhead: Part of the time of training that glances may cost; where they cost more they come
            less often.
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
