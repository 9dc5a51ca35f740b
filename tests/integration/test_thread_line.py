"""A real process in which a thread of the script holds the interpreter: the thread's line is named."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, json, threading
import torch, torchperfd
from torchperfd.v1 import session_pb2
from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.observer import LineSampler
from torchperfd_daemon.service import translate_stacks
from torchperfd_daemon.store import Rank, RankIdentity

ROWS = [{"step": number, "loss": number / 3} for number in range(2000)]
done = threading.Event()

def upload():
    while not done.is_set():
        for row in ROWS:
            text = str(row)

def wait():
    done.wait()

client = torchperfd.attach()

async def ask(rank, seconds):
    client.parts.daemon_session.handle_command(
        session_pb2.DaemonMessage(dump_stacks=session_pb2.DumpStacks(request_id=7, threads_only=True))
    )
    taken = client.parts.outbox.take(0, 1000)
    (report,) = (each.stack_report for each in taken if each.HasField("stack_report"))
    # With a daemon, a thread of torchperfd answers, which does not count.
    ours = threading.get_ident()
    return tuple(each for each in translate_stacks.report(report).threads if each.ident != ours)

async def ask_nothing(rank, seconds):
    raise AssertionError("the threads are to be asked")

async def pause(seconds):
    await asyncio.sleep(0.01)

def sample():
    verdict = Verdict(Cause.INTERPRETER_LOCK, "r", "a", None, "", "", 0.1, "")
    rank = Rank(RankIdentity("r", 0, world_size=1, node="a", pid=70), 0.0)
    sampler = LineSampler(ask_nothing, sleep=pause, threads_of=ask)
    try:
        found = asyncio.run(sampler.sample(verdict, rank))
        print(json.dumps([found and found.function, rank.blocked_by]))
    finally:
        done.set()

def main():
    model = torch.nn.Linear(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for target in (upload, wait, sample):
        threading.Thread(target=target, daemon=True).start()
    while not done.is_set():
        optimizer.zero_grad()
        model(torch.zeros(4, 32)).sum().backward()
        optimizer.step()

main()
"""


def test_line_of_the_thread_that_holds_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path), "PATH": ""}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first = SCRIPT.splitlines().index("        for row in ROWS:") + 1
    places = {f'["upload", "upload() at train.py:{line}"]' for line in (first, first + 1)}
    assert ended.stdout.splitlines()[-1] in places, ended.stdout + ended.stderr
