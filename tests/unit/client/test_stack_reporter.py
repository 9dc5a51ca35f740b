"""Reporting threads' stacks: correct, keeps no object alive, and takes no signal of the script's."""

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.descriptors import memory_files

import torchperfd
from torchperfd.link.stack_reporter import VARIABLE, _free_signal, _signal_masks
from torchperfd.v1 import contract, session_pb2

REAL_TIME = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)


def caught() -> set[int]:
    masks = _signal_masks()
    return {number for number in REAL_TIME if masks["SigCgt"] >> (number - 1) & 1}


def files() -> list[int]:
    """Return the descriptors of files for stacks that this process has open."""
    return memory_files(contract.STACKS_FILE)


def daemons(client: torchperfd.Client) -> session_pb2.StackReport:
    """Return what the client answers, asked on the calling thread."""
    client.parts.outbox.take(0, 1000)
    client.parts.daemon_session.handle_command(
        session_pb2.DaemonMessage(dump_stacks=session_pb2.DumpStacks(request_id=7))
    )
    (message,) = (one for one in client.parts.outbox.take(0, 1000) if one.HasField("stack_report"))
    assert message.stack_report.request_id == 7
    return message.stack_report


@pytest.fixture
def helper() -> Iterator[Callable[[Callable[[], None]], threading.Thread]]:
    """Start a thread that calls something and then waits until the test ends."""
    release = threading.Event()
    started: list[threading.Thread] = []

    def start(call: Callable[[], None]) -> threading.Thread:
        ready = threading.Event()

        def a_function_of_the_scripts() -> None:
            call()
            ready.set()
            release.wait()

        thread = threading.Thread(target=a_function_of_the_scripts, name="a helper")
        thread.start()
        started.append(thread)
        ready.wait()
        return thread

    yield start
    release.set()
    for thread in started:
        thread.join()


def test_stacks_have_every_thread_with_name_and_frames(
    client: torchperfd.Client, helper: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    thread = helper(lambda: None)
    report = daemons(client)
    by_ident = {daemons.ident: daemons for daemons in report.threads}
    assert set(by_ident) == set(sys._current_frames())
    assert by_ident[thread.ident or 0].name == "a helper"
    functions = [frame.function for frame in by_ident[thread.ident or 0].frames]
    at = functions.index("a_function_of_the_scripts")
    assert functions[at - 1] == "wait"
    assert functions[at:] == ["a_function_of_the_scripts", "run", "_bootstrap_inner", "_bootstrap"]
    frame = by_ident[thread.ident or 0].frames[at]
    assert frame.file == __file__
    assert "release.wait()" in Path(__file__).read_text().splitlines()[frame.line - 1]


def test_training_thread_is_the_one_with_timed_steps(
    client: torchperfd.Client, helper: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    answers: list[session_pb2.StackReport] = []
    helper(lambda: answers.append(daemons(client)))
    (training,) = (thread for thread in answers[0].threads if thread.training)
    assert training.ident == threading.main_thread().ident


def test_phase_and_step_are_those_of_the_newest_event(client: torchperfd.Client) -> None:
    assert (daemons(client).phase, daemons(client).step) == ("", 0)
    for _ in range(3):
        client.step()
    with client.phase("augment"):
        client.parts.instruments.replay.catch_up()
        assert (daemons(client).phase, daemons(client).step) == ("augment", 3)
    client.parts.instruments.replay.catch_up()
    assert daemons(client).phase == "other"


def test_answer_keeps_no_frame_and_no_script_object_alive(client: torchperfd.Client) -> None:
    class Tensor:
        pass

    def work() -> "weakref.ref[Tensor]":
        tensor = Tensor()
        daemons(client)
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()


def test_endless_recursion_and_odd_names_are_cut_to_size(client: torchperfd.Client) -> None:
    space: dict[str, Any] = {"reported": daemons, "client": client}
    name = "f" * 2000
    code = f"def {name}(n):\n    return reported(client) if not n else {name}(n - 1)\nanswer = {name}(500)\n"
    exec(compile(code, "/tmp/\udcff.py", "exec"), space)
    (thread,) = (thread for thread in space["answer"].threads if thread.training)
    assert len(thread.frames) == 128
    assert {len(frame.function) for frame in thread.frames} >= {500}
    assert thread.frames[-1].file == "/tmp/?.py"


def test_attached_it_has_one_signal_and_one_file_and_none_after() -> None:
    before = caught(), files()
    client = torchperfd.attach()
    (number,) = caught() - before[0]
    (file,) = set(files()) - set(before[1])
    assert not os.get_inheritable(file)
    invitation = json.loads(os.pread(file, 4096, 0))
    assert (invitation["signal"], invitation["training"]) == (number, threading.get_ident())
    (stream,) = (thread for thread in threading.enumerate() if thread.native_id == invitation["thread"])
    assert stream.name == "torchperfd-stream"
    assert Path(invitation["package"]) == Path(torchperfd.__file__).parent
    client.detach()
    assert (caught(), files()) == before
    assert signal.getsignal(number) == signal.SIG_DFL


def test_the_signal_writes_every_stack_behind_the_first_line(client: torchperfd.Client) -> None:
    (file,) = files()
    first = os.pread(file, 4096, 0)
    (number,) = caught()
    for _ in range(2):
        os.ftruncate(file, len(first))
        signal.pthread_kill(threading.get_ident(), number)
        text = os.pread(file, 1 << 20, 0)
        assert text.startswith(first)
        assert text.count(b"most recent call first") == len(sys._current_frames())
        assert f"in {test_the_signal_writes_every_stack_behind_the_first_line.__name__}".encode() in text


@pytest.mark.parametrize("chosen", ["off", "9", "term", "-1", "70"])
def test_without_real_time_signal_no_handler_and_no_file(
    chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, chosen)
    before = caught(), files()
    client = torchperfd.attach()
    assert (caught(), files()) == before
    assert [VARIABLE in message for message in caplog.messages] == ([] if chosen == "off" else [True])
    assert daemons(client).threads
    client.detach()


def test_signal_already_in_use_is_left_to_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    number = signal.SIGRTMIN + 3
    monkeypatch.setenv(VARIABLE, f"{number:d}")
    client = torchperfd.attach()
    assert caught() == {number}
    client.detach()
    faulthandler.register(number)
    try:
        client = torchperfd.attach()
        assert files() == []
        client.detach()
        assert caught() == {number}
    finally:
        faulthandler.unregister(number)


@given(
    st.fixed_dictionaries(
        {name: st.integers(0, 2**64 - 1).filter(lambda n: n.bit_count() > 8) for name in ("SigCgt", "SigIgn")}
    ),
    st.sampled_from(["", "34", "50"]),
)
def test_a_signal_that_anybody_has_a_use_for_is_not_taken(masks: Mapping[str, int], chosen: str) -> None:
    number = _free_signal(chosen, {**masks, "SigBlk": 0})
    free = [one for one in REAL_TIME if not any(mask >> (one - 1) & 1 for mask in masks.values())]
    if number is not None:
        assert number in free
        assert not chosen or number == int(chosen)
    elif chosen:
        assert int(chosen) not in free
    else:
        assert not set(free) & set(range(signal.SIGRTMIN + 10, signal.SIGRTMAX - 8))


def test_off_the_main_thread_the_signal_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import os, threading, torchperfd\n"
        "def attach():\n"
        "    client = torchperfd.attach()\n"
        "    print(client.parts.stacks.descriptors)\n"
        "    client.detach()\n"
        "thread = threading.Thread(target=attach)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_scripts_file_on_our_closed_descriptor_is_left_alone(tmp_path: Path) -> None:
    client = torchperfd.attach()
    (file,) = files()
    with (tmp_path / "checkpoint").open("wb") as checkpoint:
        os.dup2(checkpoint.fileno(), file)
    client.detach()
    assert os.fstat(file).st_size == 0
    os.close(file)
    assert (tmp_path / "checkpoint").read_bytes() == b""


def test_a_forked_child_has_neither_handler_nor_file(client: torchperfd.Client) -> None:
    assert (len(caught()), len(files())) == (1, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, bytes([len(caught()), len(files())]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 2) == bytes([0, 0])
    os.close(reader)
    os.close(writer)
    assert (len(caught()), len(files())) == (1, 1)
