"""Asking a process for its stacks by a signal: only one that expects it, and only while it is safe."""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.processes import HERE, process, start_ticks

from torchperfd.v1 import contract
from torchperfd_daemon.service.rank_process import GoneError, UnreachableError, describe_wait
from torchperfd_daemon.service.stuck_rank_stacks import request_stacks_by_signal
from torchperfd_daemon.stacks.model import Thread

SIGNAL = signal.SIGRTMIN + 7


def by_signal(pid: int, seconds: float = 5.0, **more: int) -> tuple[Thread, ...]:
    return asyncio.run(request_stacks_by_signal(process(pid, **more), seconds))


def reason(pid: int, **more: Any) -> str:
    with pytest.raises(UnreachableError) as caught:
        by_signal(pid, **more)
    return str(caught.value)


@pytest.fixture
def file() -> Iterator[int]:
    """A file for stacks of this very process."""
    file = os.memfd_create(contract.STACKS_FILE)
    yield file
    os.close(file)


@pytest.fixture
def handler(file: int) -> Iterator[int]:
    """A handler of the signal that writes stacks into the file, as the client registers it."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    yield SIGNAL
    faulthandler.unregister(SIGNAL)


def invite(file: int, **changes: object) -> None:
    """Write the first line as the client does, or with changes."""
    line = {
        "signal": int(SIGNAL),
        "thread": threading.get_native_id(),
        "training": threading.get_ident(),
        "package": "/nowhere/",
        **changes,
    }
    os.write(file, json.dumps(line).encode() + b"\n")


READY = """
import ctypes, faulthandler, fcntl, json, os, sys, threading, time
number, what = int(sys.argv[1]), sys.argv[2]
def flusher():
    while True:
        time.sleep(0.25)
def hang():
    if what == "interpreter held":
        ctypes.PyDLL(None).usleep(600_000_000)
    while True:
        if what == "interpreter held, now and then":
            ctypes.PyDLL(None).usleep(100_000)
        elif what == "asleep":
            time.sleep(600)
thread = threading.Thread(target=flusher, daemon=True)
thread.start()
file = os.memfd_create("torchperfd-stacks")
if what == "handler that never returns":
    libc = ctypes.CDLL(None)
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    what = "interpreter held"
else:
    faulthandler.register(number, file=file, all_threads=True)
message = {"signal": number, "thread": thread.native_id, "training": threading.get_ident(), "package": ""}
os.write(file, json.dumps(message).encode() + b"\\n")
fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
print(flush=True)
hang()
"""


@contextlib.contextmanager
def ready(what: str) -> Iterator[int]:
    """Run a process that is ready for the signal, doing one thing; yield its id."""
    with subprocess.Popen(
        [sys.executable, "-c", READY, f"{SIGNAL:d}", what], stdout=subprocess.PIPE
    ) as child:
        try:
            assert some(child.stdout).readline() == b"\n"
            yield child.pid
            assert child.poll() is None, f"it ended with {child.returncode}"
        finally:
            child.kill()


def test_signal_to_a_held_interpreter_returns_every_thread() -> None:
    with ready("interpreter held") as pid:
        for _ in range(3):
            training, flusher = sorted(by_signal(pid), key=lambda thread: not thread.training)
            assert [frame.function for frame in training.frames] == ["hang", "<module>"]
            assert flusher.frames[0].function == "flusher"
            assert not flusher.training


@pytest.mark.parametrize("what", ["asleep", "busy in Python"])
def test_signal_while_python_runs_is_not_sent(what: str) -> None:
    with ready(what) as pid:
        assert reason(pid, seconds=0.6) == (
            "Python runs in it, or may run, and asking it by a signal is not safe"
        )


def test_signal_handler_that_never_returns_costs_the_timeout() -> None:
    with ready("handler that never returns") as pid:
        assert reason(pid, seconds=1) == "it does not take signals"
        assert reason(pid, seconds=1) == f"it blocks signal {SIGNAL:d}"
        assert describe_wait(process(pid)).startswith("its main thread is in state S")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signal": int(signal.SIGTERM)}, "it names signal 15, which the daemon does not send"),
        ({"signal": 10**30}, "which the daemon does not send"),
        ({"signal": "KILL"}, "its stack file is damaged"),
        ({"signal": int(SIGNAL) + 1}, "it no longer has a handler of signal"),
        ({"thread": 1}, "its thread that takes the signal has ended"),
        ({"thread": -1}, "its thread that takes the signal has ended"),
        ({"thread": None}, "its stack file is damaged"),
        ({"thread": float("inf")}, "its stack file is damaged"),
    ],
)
def test_signal_for_an_unexpected_header_is_not_sent(
    file: int, handler: int, changes: dict[str, object], words: str
) -> None:
    invite(file, **changes)
    before = os.fstat(file).st_size
    assert words in reason(os.getpid())
    assert os.fstat(file).st_size == before


@given(
    st.binary(max_size=60).map(lambda raw: raw + b"\n")
    | st.sampled_from([b"[" * 4000 + b"\n", b"{}", b"[1]\n"])
)
def test_signal_for_a_damaged_header_is_not_sent(raw: bytes) -> None:
    file = os.memfd_create(contract.STACKS_FILE)
    try:
        os.write(file, raw)
        assert reason(os.getpid()) == "its stack file is damaged"
        assert os.fstat(file).st_size == len(raw)
    finally:
        os.close(file)


def test_signal_without_a_stack_file_is_not_sent(handler: int, file: int) -> None:
    invite(file)
    other = os.memfd_create("torchperfd-stack")
    os.dup2(other, file)
    os.close(other)
    assert reason(os.getpid()) == "its client has prepared no signal"


def test_signal_to_a_reused_process_id_is_not_sent(file: int, handler: int) -> None:
    invite(file)
    with pytest.raises(GoneError):
        by_signal(os.getpid(), ticks=start_ticks(os.getpid()) - 1)
    assert reason(os.getpid(), namespace=HERE + 1).startswith("it runs in a pid namespace of its own")
    assert os.pread(file, 1 << 16, 0).count(b"\n") == 1
