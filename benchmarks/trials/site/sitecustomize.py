"""Has a trial run without the compiled halves, where it is asked to."""

import os
import sys

if os.environ.get("TRIAL_PORTABLE"):
    for name in ("torchperfd.events._native", "torchperfd.steps._templates"):
        sys.modules[name] = None  # type: ignore[assignment]
