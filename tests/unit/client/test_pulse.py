"""The pulse: steps counted where another process sees them, and what the client does once it looks."""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.client.descriptors import memory_files
from tests.unit.client.training import loader, tiny_model, train

import torchperfd
from torchperfd import pump
from torchperfd.v1 import contract, session_pb2

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory here")


def files() -> list[int]:
    """Return the descriptors of this process's pulses."""
    return memory_files(contract.PULSE_FILE)


def told(file: int) -> tuple[int, int]:
    """Return what a reader sees: how many steps, and when the newest ended."""
    count, at = struct.unpack("=qq", os.pread(file, 16, 0))
    return count, at


def make_steps(count: int) -> None:
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(count))


def test_whoever_finds_the_file_sees_each_step_at_once(client: torchperfd.Client) -> None:
    (file,) = files()
    assert not os.get_inheritable(file)
    assert told(file) == (0, 0)
    for count in (3, 7):
        before = time.monotonic_ns()
        make_steps(count)
        seen, at = told(file)
        assert before < at < time.monotonic_ns()
        assert seen == client._pulse.beats
    assert seen == 10


def test_nobody_can_cut_off_what_training_writes_in(client: torchperfd.Client) -> None:
    (file,) = files()
    for size in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    make_steps(1)
    assert told(file)[0] == 1


def test_after_detach_nothing_is_left_of_it() -> None:
    client = torchperfd.attach()
    make_steps(2)
    client.detach()
    assert files() == []
    assert client._tape.pulse is None
    assert client._pulse.beats is None


def test_a_number_that_the_script_has_closed_and_used_again_stays_open() -> None:
    client = torchperfd.attach()
    (file,) = files()
    with Path("/dev/null").open("rb") as other:
        os.dup2(other.fileno(), file)
        client.detach()
        assert os.fstat(file).st_rdev == os.fstat(other.fileno()).st_rdev
        os.close(file)


def test_the_steps_of_a_forked_child_are_not_the_ranks(client: torchperfd.Client) -> None:
    make_steps(2)
    (file,) = files()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            make_steps(3)
            code = len(files())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert told(file)[0] == 2


def test_where_there_is_no_memory_for_it_the_client_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("torchperfd.pulse._map", refuse)
        client = torchperfd.attach()
    assert client._pulse.beats is None
    assert files() == []
    assert contract.PULSE not in client._dialogue.hello().hello.features
    make_steps(3)
    assert client.report().to_dict()["train"]["steps"] == 3


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[torchperfd.Client]:
    """A client, without its thread, that takes all steps for short and ten of them for many."""
    monkeypatch.setattr(pump, "_ENOUGH_STEPS", 10)
    monkeypatch.setattr(pump, "_SHORT_STEPS_S", (0.0, 60.0))
    client = torchperfd.attach()
    client._pump.stop(5)
    yield client
    client.detach()


def welcome(client: torchperfd.Client, *features: str) -> None:
    client._dialogue.on_welcome(session_pb2.Welcome(features=features))


def test_once_the_daemon_sees_the_steps_it_is_told_seldom(hasty: torchperfd.Client) -> None:
    assert contract.PULSE in hasty._dialogue.hello().hello.features
    make_steps(12)
    hasty._pump.turn()
    assert hasty._pump._period() == 4
    welcome(hasty, contract.PULSE)
    assert hasty._pump._period() == 16
    # The next one, after it was updated, does not look.
    welcome(hasty)
    assert hasty._pump._period() == 4


def test_seldom_turns_lose_no_step(hasty: torchperfd.Client) -> None:
    welcome(hasty, contract.PULSE)
    make_steps(12)
    hasty._pump.turn()
    assert hasty._pump._period() == 16
    client_tape = hasty._tape
    for _ in range(450_000):
        client_tape.write(14)
    assert hasty._pump._wake.empty(), "there is room for four times as many as at first"
    for _ in range(10_000):
        client_tape.write(14)
    assert not hasty._pump._wake.empty()
    assert client_tape.lost == 0


def test_a_tape_that_cannot_be_extended_is_as_long_as_it_was(
    hasty: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "_EVENTS_BETWEEN_SELDOM_TURNS", 100)
    welcome(hasty, contract.PULSE)
    make_steps(12)
    hasty._pump.turn()
    for _ in range(2):
        assert hasty._pump._period() == 16
        assert hasty._faults.counts() == {"tape": 1}
    make_steps(3)
    hasty._pump.turn()
    assert hasty._pump.account.train.steps >= 14
    assert hasty._pump._period() == 16


def test_steps_that_no_optimizer_makes_are_told_as_before(hasty: torchperfd.Client) -> None:
    welcome(hasty, contract.PULSE)
    for _ in range(20):
        hasty.step()
    hasty._pump.turn()
    assert hasty._pump.account.train.steps >= 19
    assert hasty._pump._period() == 4


def test_who_asks_is_told_at_once(hasty: torchperfd.Client) -> None:
    welcome(hasty, contract.PULSE)
    make_steps(12)
    hasty._pump.turn()
    while hasty._outbox.take(0, 100):
        pass
    make_steps(5)
    for steps in (17, 17):
        hasty._dialogue.obey(session_pb2.DaemonMessage(tell_steps=session_pb2.TellSteps()))
        messages = hasty._outbox.take(0, 100)
        assert messages[-1].account.kinds[0].steps == steps
