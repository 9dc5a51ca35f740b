"""Reading stacks: the stage of loading, the part of the step, and the line of the script."""

import pytest
from tests.support.values import some

from torchperfd_daemon.stacks.activity import Loading, Part, Stage, host_part, loading, script_lines
from torchperfd_daemon.stacks.model import Frame, Thread

TORCH = "/env/lib/python3.11/site-packages/torch/utils/data"
MODULE = Frame("/job/train.py", 90, "<module>")
DRAW = (
    Frame(f"{TORCH}/dataloader.py", 788, "_next_data"),
    Frame(f"{TORCH}/dataloader.py", 732, "__next__"),
    MODULE,
)
WORKER = (
    Frame(f"{TORCH}/_utils/worker.py", 374, "_worker_loop", "fetch"),
    Frame("/env/lib/python3.11/multiprocessing/process.py", 108, "run"),
    # A forked worker has the frames of its start.
    *DRAW,
)


def fetch(call: str = "") -> Frame:
    return Frame(f"{TORCH}/_utils/fetch.py", 54, "fetch", call)


def worker_at(call: str) -> Frame:
    return Frame(f"{TORCH}/_utils/worker.py", 330, "_worker_loop", call)


COMPREHENSION = Frame(f"{TORCH}/_utils/fetch.py", 54, "<listcomp>")
SLEEPS = Frame("/job/data.py", 37, "__getitem__", "sleep")
OPENS = Frame("/env/lib/python3.11/site-packages/PIL/Image.py", 3000, "open", "read")
GET = Frame("/env/lib/python3.11/multiprocessing/queues.py", 113, "get", "poll")


WRAPPED = Frame("/checkout/client/torchperfd/steps/wrapped.py", 41, "__next__")


def found(frames: tuple[Frame, ...], *, in_worker: bool) -> Loading | None:
    return loading(Thread(1, "", not in_worker, False, frames, 4711 if in_worker else 0))


INSIDE = [
    ((SLEEPS, COMPREHENSION, fetch()), Stage.FETCH, ("/job/data.py", 37, "__getitem__"), "sleep"),
    ((SLEEPS, fetch()), Stage.FETCH, ("/job/data.py", 37, "__getitem__"), "sleep"),
    (
        (OPENS, Frame("/job/data.py", 40, "load"), SLEEPS, COMPREHENSION, fetch()),
        *(Stage.FETCH, ("/job/data.py", 40, "load"), "open"),
    ),
    (
        (
            Frame("/job/data.py", 9, "<listcomp>", "stack"),
            Frame("/job/data.py", 9, "pad"),
            fetch("collate_fn"),
        ),
        *(Stage.COLLATE, ("/job/data.py", 9, "pad"), "stack"),
    ),
    (
        (Frame(f"{TORCH}/_utils/collate.py", 272, "collate_tensor_fn", "stack"), fetch("")),
        *(Stage.COLLATE, (f"{TORCH}/_utils/collate.py", 272, "collate_tensor_fn"), "stack"),
    ),
    (
        # A dataset of a library: where it is entered.
        (OPENS, Frame("/env/site-packages/torchvision/datasets/folder.py", 245, "__getitem__"), fetch()),
        *(Stage.FETCH, ("/env/site-packages/torchvision/datasets/folder.py", 245, "__getitem__"), "open"),
    ),
]


@pytest.mark.parametrize("outer", [DRAW, WORKER], ids=["training", "worker"])
@pytest.mark.parametrize(("inner", "stage", "place", "call"), INSIDE)
def test_loading_inside_a_fetch_names_stage_and_line(
    inner: tuple[Frame, ...],
    stage: Stage,
    place: tuple[str, int, str],
    call: str,
    outer: tuple[Frame, ...],
) -> None:
    got = some(found((*inner, *outer), in_worker=outer is WORKER))
    assert (got.stage, got.place, got.call) == (stage, Frame(*place), call)
    is_called = place[2] == "load"
    assert (got.caller and got.caller.function) == ("__getitem__" if is_called else None)


@pytest.mark.parametrize(
    ("frames", "stage", "place"),
    [
        ((GET, worker_at("get"), *WORKER[1:]), Stage.WAIT, None),
        ((worker_at("put"), *WORKER[1:]), Stage.SEND, None),
        ((SLEEPS, worker_at("init_fn"), *WORKER[1:]), Stage.OTHER, SLEEPS),
        ((), Stage.OTHER, None),
    ],
)
def test_loading_of_a_worker_outside_a_fetch(
    frames: tuple[Frame, ...], stage: Stage, place: Frame | None
) -> None:
    got = some(found(frames, in_worker=True))
    assert (got.stage, got.place) == (stage, place)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((GET, Frame(f"{TORCH}/dataloader.py", 1291, "_try_get_data"), *DRAW), Loading(Stage.WAIT)),
        (
            (
                Frame("/job/data.py", 5, "__iter__", "randperm"),
                Frame(f"{TORCH}/sampler.py", 350, "__iter__"),
                Frame(f"{TORCH}/dataloader.py", 723, "_next_index"),
                *DRAW,
            ),
            Loading(Stage.SAMPLER, Frame("/job/data.py", 5, "__iter__"), "randperm"),
        ),
        ((Frame(f"{TORCH}/_utils/pin_memory.py", 60, "pin_memory"), *DRAW), Loading(Stage.PIN)),
        ((Frame(f"{TORCH}/dataloader.py", 1200, "__init__"), MODULE), Loading(Stage.OTHER)),
        (
            (OPENS, Frame("/job/shards.py", 8, "batches"), WRAPPED, MODULE),
            Loading(Stage.FETCH, Frame("/job/shards.py", 8, "batches"), "open"),
        ),
        ((WRAPPED, MODULE), Loading(Stage.FETCH)),
        # A wrapped loader is a loader.
        (
            (GET, Frame(f"{TORCH}/dataloader.py", 1291, "_try_get_data"), *DRAW[:2], WRAPPED),
            Loading(Stage.WAIT),
        ),
        ((MODULE,), None),
        ((SLEEPS, MODULE), None),
    ],
)
def test_loading_of_the_training_thread_outside_a_fetch(
    frames: tuple[Frame, ...], expected: Loading | None
) -> None:
    assert found(frames, in_worker=False) == expected


TORCH_FOLDER = "/env/lib/python3.11/site-packages/torch"
MODULE_FRAME = Frame("/job/train.py", 90, "<module>")
TRAIN = Frame("/job/train.py", 37, "train")
CALL = Frame(f"{TORCH_FOLDER}/nn/modules/module.py", 1700, "_call_impl")
MODEL = Frame("/job/model.py", 12, "forward", "roll")


def test_host_part_of_item_without_a_device_is_other() -> None:
    frames = (Frame("/job/train.py", 50, "log", "item"), TRAIN, MODULE_FRAME)
    assert host_part(frames, on_device=False) is Part.OTHER


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ((MODEL, CALL, TRAIN, MODULE_FRAME), Part.FORWARD),
        ((Frame(f"{TORCH_FOLDER}/optim/sgd.py", 80, "step"), TRAIN, MODULE_FRAME), Part.OPTIMIZER),
        # A closure runs the model within the step of an optimizer.
        ((MODEL, CALL, TRAIN, Frame(f"{TORCH_FOLDER}/optim/lbfgs.py", 80, "step"), TRAIN), Part.OPTIMIZER),
        ((Frame(f"{TORCH_FOLDER}/autograd/graph.py", 869, "_engine_run_backward"), TRAIN), Part.BACKWARD),
        ((Frame(f"{TORCH_FOLDER}/utils/data/dataloader.py", 788, "_next_data"), TRAIN), Part.WAIT),
        ((Frame(f"{TORCH_FOLDER}/distributed/distributed_c10d.py", 3252, "all_reduce"), TRAIN), Part.WAIT),
        ((Frame("/job/train.py", 50, "log", "item"), TRAIN, MODULE_FRAME), Part.WAIT),
        ((Frame("/job/train.py", 50, "augment", "roll"), TRAIN, MODULE_FRAME), Part.OTHER),
        ((MODULE_FRAME,), Part.OTHER),
    ],
)
def test_host_part_of_a_stack(frames: tuple[Frame, ...], part: Part) -> None:
    assert host_part(frames) is part


@pytest.mark.parametrize(
    ("frames", "place", "call"),
    [
        ((MODEL, CALL, TRAIN, MODULE_FRAME), MODEL, "roll"),
        ((Frame(f"{TORCH_FOLDER}/functional.py", 9, "einsum"), TRAIN, MODULE_FRAME), TRAIN, "einsum"),
        (
            (
                Frame("/job/train.py", 51, "<listcomp>", "crop"),
                Frame("/job/train.py", 50, "augment"),
                MODULE_FRAME,
            ),
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
