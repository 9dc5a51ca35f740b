"""Many captures of many ranks: the same steps everywhere, or the rank is named that has none."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from tests.support.node import Node, eventually, torchrun

from torchperfd.v1 import control_pb2, control_pb2_grpc, session_pb2

pytestmark = [pytest.mark.slow, pytest.mark.serial]

RANKS: Final = 8
CAPTURES: Final = 50
_STEP: Final = re.compile(r'"name": "ProfilerStep#(\d+)"')

# Every rank is slow at moments of its own; the reduction makes the others wait for it.
SCRIPT: Final = """
import pathlib, random, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rng = random.Random(dist.get_rank())
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
stop = pathlib.Path(sys.argv[1])
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    ended = torch.tensor([float(dist.get_rank() == 0 and stop.exists())])
    dist.all_reduce(ended)
    optimizer.step()
    if ended:
        break
    time.sleep(rng.choice((0.005, 0.01, 0.02, 0.04)))
dist.destroy_process_group()
"""


def test_fifty_captures_of_eight_ranks_lose_none_in_silence(node: Node, tmp_path: Path) -> None:
    script, stop = tmp_path / "tiny.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    node.start_daemon()
    job = (
        *torchrun(RANKS),
        *("-m", "torchperfd", "run", "--quiet", str(script), str(stop)),
    )
    rng = random.Random(5)
    reported: list[control_pb2.CaptureProgress] = []
    with (
        node.running(*job, TORCHPERFD_RUN="many") as process,
        grpc.insecure_channel(f"unix:{node.socket}", options=[("grpc.enable_http_proxy", 0)]) as channel,
    ):
        eventually(lambda: node.metric("torchperfd_clients") == RANKS, 120, node.log)
        daemon = control_pb2_grpc.ControlStub(channel)
        for _ in range(CAPTURES):
            time.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.2))))
            *_, last = daemon.Capture(_request(rng), timeout=60)
            reported.append(last)
        stop.touch()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    faults = [fault for each in reported for fault in _faults(each)]
    states = [control_pb2.CaptureState.Name(each.state) for each in reported]
    named = sum(bool(rank.reason) for each in reported for rank in each.ranks)
    asked = sum(len(each.ranks) for each in reported)
    print(f"{states.count('CAPTURE_STATE_COMPLETE')} of {CAPTURES} captures complete;", end=" ")
    print(f"of {asked} traces {named} missing and named, {len(faults)} lost in silence")
    assert not faults
    assert len({each.capture_id for each in reported}) == CAPTURES
    assert states.count("CAPTURE_STATE_COMPLETE") > CAPTURES / 2, [each.reason for each in reported]


def _request(rng: random.Random) -> control_pb2.CaptureRequest:
    some = rng.sample(range(RANKS), rng.randint(1, RANKS)) if rng.random() < 0.5 else []
    return control_pb2.CaptureRequest(
        run="many",
        ranks=some,
        options=session_pb2.CaptureOptions(
            steps=rng.randint(1, 4),
            record_shapes=rng.random() < 0.5,
            with_stack=rng.random() < 0.2,
            profile_memory=rng.random() < 0.3,
        ),
        timeout_seconds=50,
    )


def _faults(reported: control_pb2.CaptureProgress) -> list[str]:
    """Return what of a capture is neither whole nor owned up to."""
    folder = Path(reported.directory)
    manifest = json.loads((folder / "manifest.json").read_text())
    faults = []
    if {rank["rank"] for rank in manifest["ranks"]} != {rank.rank for rank in reported.ranks}:
        faults.append(f"{reported.capture_id}: the manifest has other ranks than the report")
    for rank in manifest["ranks"]:
        where = f"{reported.capture_id} rank {rank['rank']}"
        if rank["state"] != "complete":
            if not rank["reason"] or rank["file"]:
                faults.append(f"{where}: {rank}")
            continue
        agreed = list(range(*manifest["step_range"]))
        if _steps(folder / rank["file"]) != agreed:
            faults.append(f"{where}: its trace has steps {_steps(folder / rank['file'])}, not {agreed}")
        own: dict[str, Any] = json.loads((folder / f"rank{rank['rank']}.manifest.json").read_text())
        if (own["step_range"], own["steps_made"]) != (manifest["step_range"], len(agreed)):
            faults.append(f"{where}: its own manifest has {own['step_range']}")
    return faults


def _steps(trace: Path) -> list[int]:
    return sorted({int(step) for step in _STEP.findall(trace.read_text())})
