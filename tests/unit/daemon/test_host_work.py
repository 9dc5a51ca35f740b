"""Stacks of a training thread: the part of the step, and the line of the script."""

import pytest

from torchperfd_daemon.stacks import Frame, Part, host_part, script_lines

TORCH = "/env/lib/python3.11/site-packages/torch"
MODULE = Frame("/job/train.py", 90, "<module>")
TRAIN = Frame("/job/train.py", 37, "train")
CALL = Frame(f"{TORCH}/nn/modules/module.py", 1700, "_call_impl")
MODEL = Frame("/job/model.py", 12, "forward", "roll")


def test_host_part_of_item_without_a_device_is_other() -> None:
    frames = (Frame("/job/train.py", 50, "log", "item"), TRAIN, MODULE)
    assert host_part(frames, on_device=False) is Part.OTHER


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ((MODEL, CALL, TRAIN, MODULE), Part.FORWARD),
        ((Frame(f"{TORCH}/optim/sgd.py", 80, "step"), TRAIN, MODULE), Part.OPTIMIZER),
        # A closure runs the model within the step of an optimizer.
        ((MODEL, CALL, TRAIN, Frame(f"{TORCH}/optim/lbfgs.py", 80, "step"), TRAIN), Part.OPTIMIZER),
        ((Frame(f"{TORCH}/autograd/graph.py", 869, "_engine_run_backward"), TRAIN), Part.BACKWARD),
        ((Frame(f"{TORCH}/utils/data/dataloader.py", 788, "_next_data"), TRAIN), Part.WAIT),
        ((Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"), TRAIN), Part.WAIT),
        ((Frame("/job/train.py", 50, "log", "item"), TRAIN, MODULE), Part.WAIT),
        ((Frame("/job/train.py", 50, "augment", "roll"), TRAIN, MODULE), Part.OTHER),
        ((MODULE,), Part.OTHER),
    ],
)
def test_host_part_of_a_stack(frames: tuple[Frame, ...], part: Part) -> None:
    assert host_part(frames) is part


@pytest.mark.parametrize(
    ("frames", "place", "call"),
    [
        ((MODEL, CALL, TRAIN, MODULE), MODEL, "roll"),
        ((Frame(f"{TORCH}/functional.py", 9, "einsum"), TRAIN, MODULE), TRAIN, "einsum"),
        (
            (Frame("/job/train.py", 51, "<listcomp>", "crop"), Frame("/job/train.py", 50, "augment"), MODULE),
            *(Frame("/job/train.py", 51, "augment"), "crop"),
        ),
        ((Frame("/job/train.py", 52, "<lambda>"), TRAIN), Frame("/job/train.py", 52, "<lambda>"), ""),
    ],
)
def test_script_line_of_a_stack(frames: tuple[Frame, ...], place: Frame, call: str) -> None:
    found = script_lines(frames)[0]
    assert (found.place, found.call) == (place, call)


def test_script_line_without_the_script_is_none() -> None:
    assert script_lines((CALL,)) == []
