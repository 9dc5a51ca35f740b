"""Stacks of loader workers and threads, and the line of a frame."""

import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.node import eventually
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as torchs_worker

import torchperfd
from torchperfd.hooks import worker_stacks
from torchperfd.hooks.thread_frames import line_of, stacks_now
from torchperfd.hooks.worker_stacks import WorkerStack, WorkerStacks, answer_requests, stack_lines
from torchperfd.v1 import session_pb2

METHODS = ("fork", "forkserver", "spawn")


class Gated(Dataset[Any]):
    """Waits in ``__getitem__`` until a file is there; item 3 fails, and item 5 ends its worker."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        while not self.gate.exists():
            wait_a_moment()
        if index == 3:
            raise ValueError("item 3 is damaged")
        foreign = [each for each in threading.enumerate() if isinstance(each, threading._DummyThread)]
        return torch.tensor([float(index), float(len(foreign))])


def wait_a_moment() -> None:
    time.sleep(0.01)


def workers_of(client: torchperfd.Client) -> list[WorkerStack]:
    return client.parts.instruments.hooks.links.worker_stacks.read(5.0)


def failure(loader: DataLoader[Any]) -> str:
    """Return what the script sees of an item that fails."""
    words = ""
    batches = iter(loader)
    try:
        next(batches)
    except ValueError as error:
        words = str(error)
    assert list(batches) == []
    del batches
    gc.collect()  # the traceback held the iterator, and that its worker
    assert "item 3 is damaged" in words
    return words


@pytest.mark.parametrize("method", METHODS)
def test_workers_answer_and_the_script_sees_no_difference(
    method: str, tmp_path: Path, client: torchperfd.Client
) -> None:
    gate = tmp_path / "gate"
    loader = DataLoader(
        Gated(gate), batch_size=1, num_workers=1, multiprocessing_context=method, sampler=[0, 1, 2]
    )
    batches = iter(loader)
    found: list[WorkerStack] = []

    def fetches() -> bool:
        found[:] = workers_of(client)
        return any(line.function == "__getitem__" for each in found for line in each.lines)

    eventually(fetches, 60)
    (stack,) = found
    assert (stack.pid, stack.worker) == (vars(batches)["_workers"][0].pid, 0)
    functions = [line.function for line in stack.lines]
    fetch = functions.index("fetch")
    assert "__getitem__" in functions[:fetch]
    assert functions.index("_worker_loop") > fetch
    assert Path(__file__).name in {Path(line.file).name for line in stack.lines[:fetch]}
    gate.touch()
    seen = torch.cat(list(batches))
    assert seen[:, 0].tolist() == [0, 1, 2]
    assert seen[:, 1].tolist() == [0, 0, 0], "the worker's list of threads has ours"
    workers = vars(batches)["_workers"]
    del batches
    for each in workers:
        each.join(60)
        assert each.exitcode == 0
    assert workers_of(client) == []


def test_exception_of_a_worker_is_worded_as_without_us(tmp_path: Path) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            Gated(tmp_path), batch_size=2, num_workers=1, multiprocessing_context="fork", sampler=[1, 3]
        )

    alone = failure(loader())
    client = torchperfd.attach()
    assert failure(loader()) == alone
    client.detach()


def test_detach_restores_the_function_that_workers_run() -> None:
    original = vars(torchs_worker)["_worker_loop"]
    client = torchperfd.attach()
    replaced = vars(torchs_worker)["_worker_loop"]
    assert replaced is not original
    assert replaced.__wrapped__ is original
    client.detach()
    assert vars(torchs_worker)["_worker_loop"] is original


def test_read_asks_no_more_workers_than_wanted() -> None:
    workers, fork = WorkerStacks(), multiprocessing.get_context("fork")
    release = fork.Event()
    ready = fork.Semaphore(0)

    def work() -> None:
        answer_requests(workers.name)
        ready.release()
        release.wait()

    # Not each child is a worker, and those that are not do not count.
    processes = [fork.Process(target=work) for _ in range(3)] + [fork.Process(target=release.wait)]
    for process in processes:
        process.start()
    for _ in range(3):
        ready.acquire()
    assert [len(workers.read(60, most=most)) for most in (1, 2, 64)] == [1, 2, 3]
    release.set()
    for process in processes:
        process.join()


def test_read_without_workers_is_empty() -> None:
    assert WorkerStacks().read(1.0) == []


def test_read_does_not_wait_for_a_worker_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = WorkerStacks()
    monkeypatch.setattr(worker_stacks, "_children", lambda: [os.getpid()])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{workers.name}-{os.getpid()}")
        listener.listen()
        assert workers.read(0.05) == []


def test_read_takes_no_answer_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = WorkerStacks()
    pid = os.getppid()
    monkeypatch.setattr(worker_stacks, "_children", lambda: [pid])
    # This process stands in for a stranger that has taken the name of a worker.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{workers.name}-{pid}")
        listener.listen()
        listener.settimeout(0)
        assert workers.read(60) == []  # at once


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"worker": 0, "lines": [1]}', b"\xff" * 100])
def test_read_ignores_a_damaged_answer(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = WorkerStacks()
    monkeypatch.setattr(worker_stacks, "_children", lambda: [os.getpid()])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{workers.name}-{os.getpid()}")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert workers.read(60) == []
        thread.join()


@pytest.mark.parametrize(("others", "answers"), [(0, 1), (1, 0)])
def test_answer_is_for_the_own_user_only(others: int, answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, fork = WorkerStacks(), multiprocessing.get_context("fork")
    uid = os.getuid() + others
    monkeypatch.setattr(os, "getuid", lambda: uid)
    ready, release = fork.Event(), fork.Event()

    def work() -> None:
        answer_requests(workers.name)
        ready.set()
        release.wait()

    process = fork.Process(target=work)
    process.start()
    ready.wait()
    monkeypatch.setattr(worker_stacks, "_children", lambda: [process.pid])
    for _ in range(worker_stacks.MAX_FAILURES):
        assert len(workers.read(60)) == answers
    # Another user's requests have an end, so that they do not keep the worker busy.
    eventually(lambda: (workers.connect(process.pid or 0) is None) == bool(others), 60)
    release.set()
    process.join()
    assert process.exitcode == 0


def test_stack_lines_name_what_the_innermost_frame_calls() -> None:
    lines: list[Any] = []
    ready, release = threading.Event(), threading.Lock()
    release.acquire()

    def stands_still() -> None:
        ready.set()
        release.acquire()

    thread = threading.Thread(target=stands_still)
    thread.start()
    ready.wait()

    def stands() -> bool:
        lines[:] = stack_lines(stacks_now().get(thread.ident or 0, ()))
        return bool(lines) and lines[0].function == "stands_still" and lines[0].call == "acquire"

    eventually(stands, 60)
    release.release()
    thread.join()
    assert lines[0].file == __file__


def test_loading_stacks_are_those_of_the_training_thread(client: torchperfd.Client) -> None:
    client.parts.outbox.take(0, 1000)
    order = session_pb2.DumpStacks(request_id=7, loading_only=True)
    client.parts.daemon_session.handle_command(session_pb2.DaemonMessage(dump_stacks=order))
    (message,) = (one for one in client.parts.outbox.take(0, 1000) if one.HasField("stack_report"))
    (thread,) = message.stack_report.threads
    assert thread.training
    assert thread.ident == threading.get_ident()


def test_thread_stacks_are_those_of_all_threads(client: torchperfd.Client) -> None:
    client.parts.outbox.take(0, 1000)
    order = session_pb2.DumpStacks(request_id=7, threads_only=True)
    client.parts.daemon_session.handle_command(session_pb2.DaemonMessage(dump_stacks=order))
    (message,) = (one for one in client.parts.outbox.take(0, 1000) if one.HasField("stack_report"))
    threads = message.stack_report.threads
    assert threading.get_ident() in {thread.ident for thread in threads}
    assert len(threads) > 1
    assert not any(thread.worker_pid for thread in threads)


def two_lines() -> int:
    first = 1
    return first + 1


def between_lines(code: CodeType, offset: int) -> FrameType:
    """Return a frame at an instruction of which CPython does not know the line."""
    return cast("FrameType", SimpleNamespace(f_code=code, f_lasti=offset, f_lineno=None, f_back=None))


def test_line_of_a_frame_is_the_one_it_executes() -> None:
    frame = sys._getframe()
    assert line_of(frame) == frame.f_lineno


def test_line_between_lines_is_the_nearest_before() -> None:
    code = two_lines.__code__
    last = max(start for start, _, line in code.co_lines() if line)
    assert line_of(between_lines(code, last)) == code.co_firstlineno + 2


@pytest.mark.parametrize("offset", [-1, 4])
def test_line_without_any_before_is_the_first(offset: int) -> None:
    code = two_lines.__code__.replace(co_linetable=b"") if offset > 0 else two_lines.__code__
    assert line_of(between_lines(code, offset)) == code.co_firstlineno


def test_stack_of_a_frame_between_lines_has_a_line() -> None:
    [line] = stack_lines([(two_lines.__code__, -1, None)])
    assert line.line == two_lines.__code__.co_firstlineno
