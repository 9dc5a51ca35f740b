"""How many steps and samples diagnosis needs. Pure.

The observer samples runs at intervals of :data:`SAMPLE_S`. A cause is found in a window of samples, and
published once several windows have shown it. So a run is not called healthy before a window is full.
"""

import math
from typing import Final

SAMPLE_S: Final = 1.0
WARM_STEPS: Final = 20
"""The first steps differ from the others: this many, or those of :data:`WARM_S`, are left out."""
WARM_S: Final = 10.0
WINDOW_SAMPLES: Final = 10
"""The length of the evidence window, in samples that contain a step."""
MIN_WINDOW_SAMPLES: Final = 3
"""A shorter window shows nothing."""
MIN_FINDINGS: Final = 3
"""A verdict is published after this many consecutive samples, and withdrawn after as many without it."""


def could_have_found(steps: int, step_seconds: float) -> bool:
    """Return whether any cause would have been published after so many steps of this mean length."""
    if step_seconds <= 0:
        return False
    warm = min(WARM_STEPS, math.ceil(WARM_S / step_seconds))
    samples = (steps - warm) * min(1.0, step_seconds / SAMPLE_S)
    return samples >= WINDOW_SAMPLES + MIN_FINDINGS
