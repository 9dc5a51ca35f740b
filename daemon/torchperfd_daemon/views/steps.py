"""A rank's newest steps, as ``torchperfd steps --json`` has them."""

from typing import Any

import numpy as np

from torchperfd.v1 import control_pb2
from torchperfd_daemon.views import live


def steps_dict(steps: control_pb2.RankSteps) -> dict[str, Any]:
    """Return the document: one value per step in each column, the oldest step first."""
    identity = steps.status.identity
    return {
        "schema": "torchperfd.steps/1",
        "run": identity.run,
        "rank": identity.rank,
        "node": identity.node,
        "first_step": steps.first_step,
        "end_unix_seconds": (np.frombuffer(steps.end_ns, "<i8") / 1e9).tolist(),
        "step_seconds": (np.frombuffer(steps.duration_ns, "<i8") / 1e9).tolist(),
        "phase_seconds": {name: column.tolist() for name, column in live.work(steps).phase_seconds.items()},
    }
