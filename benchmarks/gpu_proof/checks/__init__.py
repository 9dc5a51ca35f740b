"""One module per check; each has ``TITLE``, ``SECONDS`` at most on a GPU, and ``run(machine)``."""

from typing import Final

CHECKS: Final = (
    "driver_values",
    "device_times",
    "event_cost",
    "step_cost",
    "captures",
    "advice",
    "input_pipeline",
    "diagnosis",
    "out_of_memory",
)
"""In the order in which they run."""
