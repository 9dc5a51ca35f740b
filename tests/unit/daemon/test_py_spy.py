"""Stacks of a process read from outside by py-spy: the real one, and ones that misbehave."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.processes import HERE, process, start_ticks

from torchperfd_daemon.service.rank_process import GoneError, UnreachableError
from torchperfd_daemon.service.stuck_rank_stacks import find_program, read_stacks_by_py_spy
from torchperfd_daemon.stacks.model import Frame, Thread, parse_py_spy

HELD = """
import ctypes, json, os, threading, time
def wait():
    time.sleep(600)
def hang():
    print(flush=True)
    ctypes.PyDLL(None).usleep(600_000_000)
thread = threading.Thread(target=wait, name="a helper", daemon=True)
thread.start()
file = os.memfd_create("torchperfd-stacks")
header = {"signal": 50, "thread": thread.native_id, "training": threading.get_ident(), "package": "/nowhere/"}
os.write(file, json.dumps(header).encode() + b"\\n")
hang()
"""


def read(pid: int, program: Path | None = None, seconds: float = 20.0, **more: int) -> tuple[Thread, ...]:
    return asyncio.run(read_stacks_by_py_spy(process(pid, **more), seconds, program))


def reason(program: Path, **more: Any) -> str:
    with pytest.raises(UnreachableError) as caught:
        read(os.getpid(), program, **more)
    return str(caught.value)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Write a program that a test calls py-spy."""

    def write(script: str) -> Path:
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.mark.needs("py-spy")
def test_read_of_a_held_interpreter_returns_every_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE) as child:
        try:
            assert some(child.stdout).readline() == b"\n"
            training, helper = sorted(read(child.pid), key=lambda thread: not thread.training)
            assert [(frame.function, frame.line) for frame in training.frames] == [
                ("hang", 7),
                ("<module>", 13),
            ]
            assert (helper.name, helper.training, helper.frames[0].function) == ("a helper", False, "wait")
            assert [frame.function for frame in helper.frames[1:]] == [
                "run",
                "_bootstrap_inner",
                "_bootstrap",
            ]
            assert child.poll() is None
        finally:
            child.kill()


@pytest.mark.needs("py-spy")
def test_read_of_no_python_process_says_why() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with pytest.raises(UnreachableError, match="py-spy failed: "):
                read(child.pid)
        finally:
            child.kill()


def test_read_of_a_reused_process_id_is_discarded(program: Callable[[str], Path]) -> None:
    with pytest.raises(GoneError):
        read(os.getpid(), program("echo '[]'"), ticks=start_ticks(os.getpid()) - 1)


def test_read_in_another_pid_namespace_starts_nothing(tmp_path: Path) -> None:
    words = "it runs in a pid namespace of its own, where the daemon cannot reach it"
    assert reason(tmp_path / "absent", namespace=HERE + 1) == words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'Error: Permission denied (os error 13)' >&2; exit 1",
            "py-spy may not read it; run the daemon as",
        ),
        ("printf 'no\\033[2J\\nmore' >&2; exit 1", r"py-spy failed: no\?\[2J$"),
        ("exit 3", "py-spy failed: no error output"),
        ("echo '[]'", "py-spy found no Python frame in it"),
        ("echo nonsense", "the daemon cannot read py-spy's output"),
        ("exec cat /dev/zero", "py-spy failed: "),
    ],
)
def test_read_by_a_failing_program_says_why(program: Callable[[str], Path], script: str, words: str) -> None:
    assert re.match(words, reason(program(script)))


def test_read_that_takes_too_long_ends_the_program(program: Callable[[str], Path], tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    slow = program(f"echo $$ > {pid_file}; exec sleep 60")
    while not pid_file.exists():  # on a busy node the shell may not have come so far
        assert reason(slow, seconds=0.5) == "py-spy did not finish within 0.5 s"
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_find_program_takes_the_first_trusted_one(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("open", "open_file", "plain", "good", "later", "shared")]
    for path in paths:
        path.mkdir()
        (path / "py-spy").touch(mode=0o755)
    paths[0].chmod(0o777)
    (paths[1] / "py-spy").chmod(0o757)
    (paths[2] / "py-spy").chmod(0o644)
    found = find_program([Path("relative"), tmp_path / "absent", *paths])
    # Root may run what is not executable no more than others.
    assert found == paths[3] / "py-spy"
    with pytest.raises(
        UnreachableError, match=r"open/py-spy can be changed by other users, so it is not run"
    ):
        find_program(paths[:1])
    paths[5].chmod(0o775)
    with pytest.raises(UnreachableError, match=r"shared/py-spy can be changed by other users"):
        find_program(paths[5:])
    with pytest.raises(UnreachableError, match=r"py-spy is not installed .*`pip install py-spy`"):
        find_program([tmp_path / "absent"])


def test_find_program_link_into_an_open_directory_is_refused(tmp_path: Path) -> None:
    for name in ("bin", "open"):
        (tmp_path / name).mkdir()
    (tmp_path / "open/py-spy").touch(mode=0o755)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "bin/py-spy").symlink_to(tmp_path / "open/py-spy")
    with pytest.raises(UnreachableError, match="can be changed by other users"):
        find_program([tmp_path / "bin"])


def dumped(**changes: Any) -> dict[str, Any]:
    frame = {
        "name": "Model.forward.<locals>.<lambda>",
        "filename": "/job/train.py",
        "line": 41,
        "locals": None,
    }
    return {"pid": 7, "thread_id": 5, "thread_name": None, "os_thread_id": 7, "frames": [frame], **changes}


def test_parse_py_spy_plain_names_and_training_thread() -> None:
    data = json.dumps([dumped(thread_id=9, os_thread_id=8), dumped(thread_name="MainThread")]).encode()
    frames = (Frame("/job/train.py", 41, "<lambda>"),)
    other, main = Thread(9, "", False, False, frames), Thread(5, "MainThread", True, False, frames)
    assert parse_py_spy(data, 7, 0) == (other, main)
    assert [thread.training for thread in parse_py_spy(data, 7, 9)] == [True, False]


@pytest.mark.parametrize("line", [-1, 2**31, 2**70])
def test_parse_py_spy_impossible_line_is_unknown(line: int) -> None:
    frame = {"name": "f", "filename": "a.py", "line": line}
    (thread,) = parse_py_spy(json.dumps([dumped(frames=[frame], thread_id=-1)]).encode(), 7, 0)
    assert (thread.frames[0].line, thread.ident) == (0, 2**64 - 1)


@given(
    st.binary().filter(lambda data: data.strip() != b"[]")  # no threads at all have that form
    | st.sampled_from([b"[" * 100_000, b"null", b"{}", b"[1]", json.dumps([dumped(frames=None)]).encode()])
)
def test_parse_py_spy_of_another_form_raises(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_py_spy(data, 7, 0)
