"""The findings of diagnosis on a run. Triggers fire on them, so that they and the verdict never disagree."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchperfd_daemon.diagnosis.detect.stall import Stall


@dataclass(frozen=True, slots=True)
class RunFindings:
    """The newest findings on one run.

    Attributes:
        step_seconds: Its present mean step; 0 before it is known.
        normal_seconds: The step before the run became slower; None while it is not slower than usual.
        culprit: The rank that the first verdict names; None if it names none.
        late_seconds: For each straggler, its own work per step above the peers' median.
        peer_seconds: The peers' median own work per step.
        stall: The longest stall of any rank now.
    """

    step_seconds: float = 0.0
    normal_seconds: float | None = None
    culprit: int | None = None
    late_seconds: Mapping[int, float] = field(default_factory=dict)
    peer_seconds: float = 0.0
    stall: Stall | None = None
    stalled_ranks: tuple[int, ...] = ()
