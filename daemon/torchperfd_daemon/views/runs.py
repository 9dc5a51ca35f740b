"""The runs of a node or of a fleet, as ``torchperfd ps --json`` has them."""

from typing import Any

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.views import live


def run_dict(run: control_pb2.Run) -> dict[str, Any]:
    """Return a run with its ranks."""
    return {
        "run": run.run,
        "job_name": run.job_name,
        "world_size": run.world_size,
        "ranks": [
            {
                "rank": rank.identity.rank,
                "local_rank": rank.identity.local_rank,
                "node": rank.identity.node,
                "pid": rank.identity.pid,
                "script": rank.identity.script,
                "state": live.state(rank) if rank.connected else _state(rank),
                "stalled_seconds": rank.stalled_seconds or None,
                "connected": rank.connected,
                "steps": rank.steps,
                "step_seconds": rank.step_seconds,
                "phase_seconds": dict(rank.phase_seconds),
                "last_step_unix_seconds": rank.last_step_unix_seconds or None,
                "dropped_steps": rank.dropped_steps,
            }
            for rank in run.ranks
        ],
    }


def _state(rank: control_pb2.RankStatus) -> str:
    return session_pb2.RunState.Name(rank.state).removeprefix("RUN_STATE_").lower()
