"""The line of a verdict: of a stage, of the script's code, and of a thread."""

import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually, new_node, side_by_side

pytestmark = pytest.mark.slow

WITHIN_S = 180
"""How long a test waits; on a machine that is not overloaded the line is there after fifteen seconds."""

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

fault, workers = sys.argv[1], int(sys.argv[2])

class Images(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        if fault == "getitem":
            time.sleep(0.02)
        return torch.ones(8)

def collate(items):
    if fault == "collate":
        time.sleep(0.08)
    return torch.stack(items)

def confusion():
    if fault == "own code":
        time.sleep(0.025)
        # No line has most of the samples, but their call has.
        time.sleep(0.025)
        time.sleep(0.025)

if __name__ == "__main__":
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Images(), batch_size=4, num_workers=workers, collate_fn=collate)
    for images in loader:
        optimizer.zero_grad()
        model(images).sum().backward()
        optimizer.step()
        matrix = confusion()
"""
CASES = {
    "getitem in workers": ("getitem", "2"),
    "collate without workers": ("collate", "0"),
}
OWN_CODE = {"own code": ("own code", "0")}


def lines_of(node: Node, cause: str) -> list[Any]:
    """Return the lines of the verdicts on a cause; on a busy machine, it need not be the first of them."""
    # The page first: a command takes a processor for a quarter of a second.
    if not node.metric(f'torchperfd_train_lost_seconds_total{{cause="{cause}"'):
        return []
    verdicts = [one for verdict in node.json("diagnose")["verdicts"] for one in (verdict, *verdict["others"])]
    return [verdict["line"] for verdict in verdicts if verdict["line"] and verdict["cause"] == cause]


def line_of(text: str) -> int:
    (number,) = (number for number, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)
    return number


def train(case: str, directory: Path) -> tuple[Any, bool]:
    """Return the line of a run's verdict, and whether stacks of its workers were seen."""
    script = directory / f"{case.replace(' ', '-')}.py"
    script.write_text(SCRIPT)
    arguments, cause = {**CASES, **OWN_CODE}[case], "script code" if case in OWN_CODE else "input-bound"
    with new_node() as node:
        node.start_daemon()
        with node.train(*arguments, script=script, options=()):
            found: list[Any] = []

            def is_known() -> bool:
                found[:] = lines_of(node, cause)
                return bool(found)

            eventually(is_known, WITHIN_S, node.log)
            assert found[0]["file"] == str(script)
            if not found[0]["in_workers"]:
                return found[0], bool(node.json("stacks")["workers"])
            eventually(lambda: node.json("stacks")["workers"], WITHIN_S, node.log)
            return found[0], True


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[tuple[Any, bool]]]:
    directory = tmp_path_factory.mktemp("slow lines")
    return side_by_side({case: partial(train, case, directory) for case in (*CASES, *OWN_CODE)})


@pytest.mark.parametrize("case", CASES)
def test_verdict_names_the_line_that_waits(case: str, outcomes: dict[str, Future[tuple[Any, bool]]]) -> None:
    line, seen_workers = outcomes[case].result()
    in_getitem = case.startswith("getitem")
    number = line_of("time.sleep(0.02)" if in_getitem else "time.sleep(0.08)")
    assert (line["line"], line["call"]) == (number, "sleep")
    assert line["function"] == ("__getitem__" if in_getitem else "collate")
    assert line["stage"] == ("fetch" if in_getitem else "collate")
    assert line["in_workers"] == seen_workers == in_getitem


def test_verdict_names_the_call_of_the_scripts_code(outcomes: dict[str, Future[tuple[Any, bool]]]) -> None:
    line, _ = outcomes["own code"].result()
    assert (line["line"], line["call"]) == (line_of("matrix = confusion()"), "confusion")
    assert (line["function"], line["stage"], line["of_step"]) == ("<module>", "other", True)


THREAD_SCRIPT = """
import asyncio, json, threading
import torch, torchperfd
from torchperfd.v1 import session_pb2
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.line_sampler import LineSampler
from torchperfd_daemon.service.translate_diagnosis import stack_report_from_message
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.store.model import RankIdentity

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
    return tuple(each for each in stack_report_from_message(report).threads if each.ident != ours)

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
    script.write_text(THREAD_SCRIPT)
    environment = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path), "PATH": ""}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first = THREAD_SCRIPT.splitlines().index("        for row in ROWS:") + 1
    places = {f'["upload", "upload() at train.py:{line}"]' for line in (first, first + 1)}
    assert ended.stdout.splitlines()[-1] in places, ended.stdout + ended.stderr
