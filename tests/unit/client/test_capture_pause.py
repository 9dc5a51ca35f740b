"""Estimates of the pause at a capture's end, and the warning about a long one."""

import pytest
import torch

from torchperfd.captures.pause import NodeCounter, PauseEstimate, warning
from torchperfd.captures.state import MEMORY, CaptureOptions
from torchperfd.hooks.profiler import node_reader

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
    estimate.learn_pause(9.0, CaptureOptions(kind=MEMORY))
    assert not estimate.is_known
    estimate.learn_nodes(1000)
    assert estimate.seconds(CaptureOptions(kind=MEMORY)) == 0.0


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
