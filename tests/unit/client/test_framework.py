"""The framework of a loop, from the frames of the training thread."""

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from tests.unit.client.training import loader, tiny_model, train

import torchperfd
from torchperfd.stacks.thread_frames import framework_around


def within(module: str, inner: Callable[[], Any]) -> Any:
    """Call ``inner`` from a function that a module of this name would have."""
    called = FunctionType(_template.__code__, {"__name__": module, "inner": inner})
    return called()


def _template() -> Any:
    return inner()  # type: ignore[name-defined]  # noqa: F821 - from the globals it is given


def asked() -> str:
    return framework_around(threading.get_ident())


@pytest.mark.parametrize(
    ("modules", "framework"),
    [
        (["__main__"], ""),
        (["lightning.pytorch.loops.fit_loop"], "lightning"),
        (["pytorch_lightning.trainer.trainer", "my_model"], "lightning"),
        (["my_script", "transformers.trainer", "accelerate.data_loader"], "transformers"),
        (["fastai.learner", "ignite.engine.engine"], "fastai"),
        (["lightningly", "accelerate.accelerator", "torch.nn.modules"], ""),
    ],
)
def test_the_outermost_loop_counts(modules: list[str], framework: str) -> None:
    call = asked
    for module in reversed(modules):
        call = functools.partial(within, module, call)
    assert call() == framework


def test_a_thread_that_is_gone_is_in_no_loop() -> None:
    assert framework_around(0) == ""


def test_framework_is_sent_with_the_state(client: torchperfd.Client) -> None:
    client.parts.flusher.stop(5)
    client.parts.outbox.take(0, 100)
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    within("transformers.trainer", client.parts.flusher.flush)
    [message] = client.parts.outbox.take(0, 100)
    assert message.state.framework == "transformers"
