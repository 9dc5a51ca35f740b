"""A real process whose native code holds the interpreter: the line of that code is named, not a later one."""

import subprocess
import sys
from pathlib import Path

import pytest

# A caller is named by its share of the samples, and other load shifts shares.
pytestmark = pytest.mark.serial

SCRIPT = """
import asyncio, json, sys, threading
import torch, torchperfd
from torch.utils.data import DataLoader, Dataset
from torchperfd.v1 import session_pb2
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.line_sampler import LineSampler
from torchperfd_daemon.service.translate_diagnosis import stack_report_from_message
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.store.model import RankIdentity

where = sys.argv[1]
TEXT = json.dumps([0.5] * 40_000)

def records():
    return json.loads(TEXT)

class Images(Dataset):
    images = torch.ones(64, 3, 32, 32)
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        if where == "dataset":
            found = records()
        image = self.images[index % 64].clone()
        return image * 0.9

def metrics(output):
    if where == "loop":
        found = records()
    return output.detach().clone().mul_(0.9)

client = torchperfd.attach()
done = threading.Event()

async def ask(rank, seconds):
    client.parts.daemon_session.handle_command(
        session_pb2.DaemonMessage(dump_stacks=session_pb2.DumpStacks(request_id=7, loading_only=True))
    )
    taken = client.parts.outbox.take(0, 1000)
    (report,) = (each.stack_report for each in taken if each.HasField("stack_report"))
    return stack_report_from_message(report).threads

def sample():
    cause, phase = (Cause.INPUT_BOUND, "data") if where == "dataset" else (Cause.SCRIPT_CODE, "other")
    verdict = Verdict(cause, "r", "a", None, phase, "", 0.1, "")
    rank = Rank(RankIdentity("r", 0, world_size=1, node="a", pid=70), 0.0)
    async def pause(seconds):
        await asyncio.sleep(0.01)
    found = asyncio.run(LineSampler(ask, sleep=pause).sample(verdict, rank))
    print(json.dumps(found and [found.function, found.call, found.caller]))
    done.set()

def main():
    model = torch.nn.Linear(3 * 32 * 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, images in enumerate(DataLoader(Images(), batch_size=4)):
        if step == 3:  # torch has imported what it needs
            threading.Thread(target=sample, daemon=True).start()
        optimizer.zero_grad()
        output = model(images.flatten(1))
        output.sum().backward()
        optimizer.step()
        metrics(output)
        if done.is_set():
            break

main()
"""


@pytest.mark.parametrize("where", ["dataset", "loop"])
def test_line_is_that_of_native_code(where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path), "PATH": ""}
    ended = subprocess.run(
        [sys.executable, str(script), where],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    line = SCRIPT.splitlines().index("        image = self.images[index % 64].clone()")
    caller = f'"train.py:{line} in __getitem__"' if where == "dataset" else '""'
    assert ended.stdout.splitlines()[-1] == f'["records", "loads", {caller}]', ended.stderr
