"""Frames of ``top``: two runs at most, in which rank 5 has more to do than the others."""

import numpy as np

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_cli.commands._top_charts import ages, step_seconds
from torchperfd_cli.commands._top_state import Frame, GpuView, NodeView
from torchperfd_daemon.views import live

MS = 10**6


def rank_steps(rank: int, run: str = "bert-17", ranks: int = 8) -> control_pb2.RankSteps:
    """Return thirty steps of 100 ms, in which rank 5 has 40 ms more to do and the others wait for it."""
    own = {"data": 10, "forward": 40 if rank == 5 else 20, "backward": 50 if rank == 5 else 30}
    phases = {**own, "collective_wait": 100 - sum(own.values())}
    wobble = np.array([1 + 0.02 * ((step * 7 + rank * 3) % 5 - 2) for step in range(30)])
    columns = {name: (wobble * ms * MS).astype("<i8") for name, ms in phases.items()}
    duration = np.asarray(sum(columns.values()))
    return control_pb2.RankSteps(
        status=control_pb2.RankStatus(
            identity=session_pb2.RankIdentity(
                run=run, rank=rank, world_size=ranks, node=f"node-{rank // 4}", pid=4000 + rank
            ),
            state=session_pb2.RUN_STATE_TRAINING,
            connected=True,
            steps=1000,
            last_step_unix_seconds=1000.0 - 0.25,
        ),
        first_step=970,
        count=30,
        end_ns=np.arange(30, dtype="<i8").tobytes(),
        duration_ns=duration.astype("<i8").tobytes(),
        phases=[session_pb2.PhaseColumn(phase=name, ns=column.tobytes()) for name, column in columns.items()],
    )


def frame(ranks: int = 8, runs: tuple[str, ...] = ("bert-17",), gpus: int = 2) -> Frame:
    steps = [rank_steps(rank, run, ranks) for run in runs for rank in range(ranks)]
    verdicts = {
        run: control_pb2.Verdict(
            cause="slow rank",
            run=run,
            rank=5,
            node="node-1",
            evidence="40 ms of each 100 ms step more than its peers need",
            cost_seconds_per_step=0.04,
            step_seconds=0.1,
            fix="give this rank as much work as its peers",
            next_command=f"torchperfd capture --run {run} --steps 5",
        )
        for run in runs
    }
    each = tuple(GpuView(str(number), "H100", 0.5, 2.0**36, 2.0**37, 300.0, 60.0) for number in range(gpus))
    return Frame(
        "node-0",
        "12:00:00",
        NodeView(0.8, 2.0**33, 2.0**34, each),
        live.runs(steps),
        verdicts,
        step_seconds=step_seconds(steps),
        samples_per_second=dict.fromkeys(runs, (1200.0, 1280.0, 1240.0)),
        ages=ages(steps, 1000.0),
        steps=steps,
    )
