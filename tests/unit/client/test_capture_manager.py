"""The client's captures: which comes when, and how long they pause the training."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.client.captured_loop import step, train_until

import torchperfd
from torchperfd.captures.manager import CaptureManager
from torchperfd.captures.state import CaptureOptions, NodeCounter, PauseEstimate, warning
from torchperfd.errors import CaptureError
from torchperfd.hooks.profiler import node_reader
from torchperfd.launch import conclusion
from torchperfd.model.capture_options import CaptureKind
from torchperfd.v1 import session_pb2
from torchperfd.v1.contract import new_capture_id

STEPS = 2


def acknowledgement(client: torchperfd.Client) -> session_pb2.CaptureAck:
    """Return the answer to the order to prepare."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for message in client.parts.outbox.take(0.1, 100):
            if message.HasField("capture_ack"):
                return message.capture_ack
    raise AssertionError("prepare is not answered")


def begin_automatic(client: torchperfd.Client, *, commit: bool = True) -> str:
    """Have a capture made as the daemon orders it for the run itself; return its id."""
    for _ in range(5):
        step()
    client.parts.flusher.flush()
    captures = client.parts.captures
    capture_id = new_capture_id(time.time())
    options = session_pb2.CaptureOptions(steps=STEPS, automatic=True)
    prepare = session_pb2.PrepareCapture(
        capture_id=capture_id, options=options, directory=str(captures.directory.folder(capture_id))
    )
    captures.handle_command(session_pb2.DaemonMessage(prepare_capture=prepare))
    ack = acknowledgement(client)
    assert (ack.ready, ack.reason) == (True, "")
    if commit:
        begin = session_pb2.CommitCapture(capture_id=capture_id, start_step=ack.next_step + 2, steps=STEPS)
        captures.handle_command(session_pb2.DaemonMessage(commit_capture=begin))
    return capture_id


def trace_of(captures: CaptureManager, capture_id: str) -> Path:
    return captures.directory.folder(capture_id) / "rank0.json"


def test_script_capture_comes_after_the_automatic_one(client: torchperfd.Client) -> None:
    automatic = begin_automatic(client)
    capture = client.capture(steps=STEPS)
    with pytest.raises(CaptureError, match="another capture is in progress"):
        client.capture()
    assert capture.state == "queued"
    train_until(capture)
    assert capture.wait().exists()
    assert trace_of(client.parts.captures, automatic).exists()
    assert client.parts.captures.newest_id == capture.id


def test_automatic_capture_is_committed_behind_the_script(client: torchperfd.Client) -> None:
    """The daemon's commit and cancellation reach it although the script's capture is the newest."""
    automatic = begin_automatic(client, commit=False)
    capture = client.capture(steps=STEPS)
    cancel = session_pb2.CancelCapture(capture_id=automatic, reason="enough")
    client.parts.captures.handle_command(session_pb2.DaemonMessage(cancel_capture=cancel))
    train_until(capture)
    assert capture.wait().exists()
    assert not trace_of(client.parts.captures, automatic).exists()


def test_end_of_the_loop_ends_both_captures(client: torchperfd.Client) -> None:
    automatic = begin_automatic(client)
    capture = client.capture(steps=STEPS)
    client.finish()
    with pytest.raises(CaptureError, match="training ended before the chosen steps"):
        capture.wait(0)
    assert not trace_of(client.parts.captures, automatic).exists()


def test_given_up_capture_delays_the_end_no_longer(client: torchperfd.Client) -> None:
    begin_automatic(client, commit=False)
    capture = client.capture(steps=STEPS)
    client.parts.captures.give_up("interrupted")
    with pytest.raises(CaptureError, match="interrupted"):
        capture.wait(0)
    client.finish()


def test_ctrl_c_while_a_trace_is_written_gives_it_up() -> None:
    interrupts, done = [KeyboardInterrupt()], []

    def finish() -> None:
        if interrupts:
            raise interrupts.pop()
        done.append("finished")

    captures = SimpleNamespace(give_up=done.append)
    client: Any = SimpleNamespace(finish=finish, parts=SimpleNamespace(captures=captures))
    conclusion.finish_client(client)
    assert done == ["interrupted while its trace was written", "finished"]


FIVE = CaptureOptions(steps=5)


def test_estimate_without_knowledge_is_zero() -> None:
    estimate = PauseEstimate()
    assert (estimate.is_known, estimate.seconds(FIVE)) == (False, 0.0)


def test_estimate_from_nodes_grows_with_steps() -> None:
    estimate = PauseEstimate()
    estimate.learn_nodes(1000)
    assert estimate.seconds(FIVE) == pytest.approx(0.625)
    assert estimate.seconds(CaptureOptions(steps=10)) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        (CaptureOptions(record_shapes=True), 2.9),
        (CaptureOptions(with_flops=True), 2.9),
        (CaptureOptions(with_stack=True), 2.0),
        (CaptureOptions(with_modules=True), 2.0),
        (CaptureOptions(profile_memory=True), 1.3),
        (CaptureOptions(record_shapes=True, with_stack=True, profile_memory=True), 4.2),
    ],
)
def test_estimate_grows_with_what_is_recorded(options: CaptureOptions, times: float) -> None:
    estimate = PauseEstimate()
    estimate.learn_nodes(1000)
    assert estimate.seconds(options) == pytest.approx(times * estimate.seconds(FIVE))


def test_measured_pause_replaces_the_estimate() -> None:
    estimate = PauseEstimate()
    estimate.learn_nodes(1000)
    estimate.learn_pause(2.9, CaptureOptions(steps=2, record_shapes=True))
    estimate.learn_nodes(7)
    assert estimate.seconds(CaptureOptions(steps=4)) == pytest.approx(2.0)


def test_memory_snapshot_has_no_estimate() -> None:
    estimate = PauseEstimate()
    estimate.learn_pause(9.0, CaptureOptions(kind=CaptureKind.MEMORY))
    assert not estimate.is_known
    estimate.learn_nodes(1000)
    assert estimate.seconds(CaptureOptions(kind=CaptureKind.MEMORY)) == 0.0


def test_counter_takes_one_training_step() -> None:
    numbers = iter((10, 52))
    counter = NodeCounter(lambda: next(numbers))
    for index in (1, 2, 3):
        counter.train_edge(index)
    assert (counter.ended.is_set(), counter.nodes) == (True, 42)


def test_counter_begins_again_after_validation() -> None:
    numbers = iter((10, 100, 142))
    counter = NodeCounter(lambda: next(numbers))
    counter.train_edge(1)
    counter.validate_edge()
    counter.train_edge(2)
    assert not counter.ended.is_set()
    counter.train_edge(3)
    assert counter.nodes == 42


def test_reader_counts_torchs_nodes() -> None:
    read = node_reader()
    assert read is not None
    before = read()
    (torch.ones(2, requires_grad=True) * 2).relu().sum()
    assert read() - before == 3


def test_reader_of_a_torch_without_numbers_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    assert node_reader() is None


def test_short_pause_has_no_warning() -> None:
    assert warning(0.9, FIVE) == ""


def test_warning_names_the_remedy() -> None:
    assert warning(1.26, FIVE) == (
        "training will pause for about 1.3 s when the capture of 5 step(s) ends; capture fewer steps"
    )
    assert warning(3.0, CaptureOptions(2, record_shapes=True, with_stack=True)).endswith(
        "capture fewer steps, or leave out shapes and stacks"
    )
