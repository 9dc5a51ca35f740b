import statistics
import time
from functools import partial
from typing import Any

import pytest
import torch
from tests.frameworks.fits import BATCH, assert_has, calls, dataset, faults, model, samples
from tests.unit.client.scripted import unpack
from torch import nn

import torchperfd
from torchperfd.steps.phases import StepBatch
from torchperfd.steps.recorder import Recorder

HOW = (
    "pip install --no-deps torchvision==0.28.0 fastai fastcore fastprogress fastdownload fasttransform "
    "python-fasthtml, then plum-dispatch<2.10 matplotlib pandas itsdangerous oauthlib python-multipart "
    "beautifulsoup4 httpx2"
)
pytest.importorskip("fastai", reason=HOW)
from fastai.callback.core import Callback  # noqa: E402
from fastai.callback.progress import ProgressCallback  # noqa: E402
from fastai.callback.training import GradientAccumulation  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.data.load import DataLoader  # noqa: E402
from fastai.learner import Learner  # noqa: E402
from fastai.optimizer import Optimizer, OptimWrapper, sgd_step  # noqa: E402

from torchperfd.integrations.fastai import TorchperfdCallback  # noqa: E402

TRAIN, VALIDATE, EPOCHS = 6, 3, 2

pytestmark = pytest.mark.filterwarnings("ignore")


class Losses(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_loss(self) -> None:
        self.seen.append(self.learn.loss.item())


def learner(*callbacks: Any, **options: Any) -> Any:
    loaders = DataLoaders(
        DataLoader(dataset(TRAIN), bs=BATCH, num_workers=0),
        DataLoader(dataset(VALIDATE), bs=BATCH, num_workers=0),
    )
    return Learner(loaders, model(), loss_func=nn.CrossEntropyLoss(), cbs=list(callbacks), **options)


def fit(learner: Any) -> None:
    learner.remove_cb(ProgressCallback)
    with learner.no_logging():
        learner.fit(EPOCHS, 1e-2)


def test_every_step_and_phase_is_there() -> None:
    callback = TorchperfdCallback(job="digits", run="digits-1")
    subject = learner(callback)
    fit(subject)
    client = callback.client
    steps, validated = EPOCHS * TRAIN, EPOCHS * VALIDATE
    train = calls(client)
    assert_has(train, steps=steps, data=steps, forward=steps, loss=steps, backward=steps)
    assert_has(train, optimizer=steps, zero_grad=steps)
    validate = calls(client, "validate")
    assert_has(validate, steps=validated, data=validated, forward=validated, backward=0, optimizer=0)
    assert samples(client) == steps * BATCH
    assert samples(client, "validate") == validated * BATCH
    assert faults(client) == {}
    assert client is not None
    assert not client.attached
    assert (client.run, client.parts.identity.job_name) == ("digits-1", "digits")
    assert not {"step", "zero_grad"} & vars(subject.opt).keys()


def test_gradient_accumulation_makes_one_step_of_several_batches() -> None:
    callback = TorchperfdCallback()
    fit(learner(callback, GradientAccumulation(2 * BATCH)))
    steps = EPOCHS * TRAIN // 2
    assert_has(calls(callback.client), steps=steps, optimizer=steps, forward=2 * steps, backward=2 * steps)


def test_an_optimizer_of_torchs_is_timed_once() -> None:
    callback = TorchperfdCallback()
    fit(learner(callback, opt_func=partial(OptimWrapper, opt=torch.optim.Adam)))
    steps = EPOCHS * TRAIN
    assert_has(calls(callback.client), steps=steps, optimizer=steps, zero_grad=steps, forward=steps)


def test_a_second_fit_starts_afresh() -> None:
    callback = TorchperfdCallback()
    subject = learner(callback)
    fit(subject)
    fit(subject)
    assert_has(calls(callback.client), steps=EPOCHS * TRAIN, optimizer=EPOCHS * TRAIN)


def test_the_users_client_stays() -> None:
    client = torchperfd.attach()
    callback = TorchperfdCallback()
    fit(learner(callback))
    assert callback.client is client
    assert client.attached
    assert_has(calls(client), steps=EPOCHS * TRAIN)


def test_losses_are_the_same_bit_for_bit() -> None:
    ours, theirs = Losses(), Losses()
    for callbacks in ((ours, TorchperfdCallback()), (theirs,)):
        torch.manual_seed(0)
        fit(learner(*callbacks))
    assert len(ours.seen) == EPOCHS * (TRAIN + VALIDATE)
    assert ours.seen == theirs.seen


def test_a_failure_of_ours_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, losses = TorchperfdCallback(), Losses()

    def fail(*_: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("torchperfd.steps.loop.Loop.optimizer_begin", fail)
    fit(learner(callback, losses))
    assert len(losses.seen) == EPOCHS * (TRAIN + VALIDATE)
    assert faults(callback.client)["hook optimizer"] == 10


PAUSE = 0.03
"""Of each phase; what fastai spends between two events, about half a millisecond, is far below 5 % of it."""


class SlowLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return gradients[0]


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return SlowLayer.apply(self.model(inputs))  # type: ignore[no-any-return, no-untyped-call]


class SlowOptimizer(Optimizer):  # type: ignore[misc]
    def step(self, closure: Any = None) -> None:
        time.sleep(PAUSE)
        super().step(closure)

    def zero_grad(self) -> None:
        time.sleep(PAUSE)
        super().zero_grad()


def slow_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(PAUSE)
    return nn.functional.cross_entropy(predictions, targets)


def slow_batch(samples: Any) -> Any:
    time.sleep(PAUSE)
    return tuple(torch.stack(part) for part in zip(*samples, strict=True))


def test_medians_are_those_of_fastxtends_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test here: importing fastxtend replaces parts of fastai's loop."""
    profiler = pytest.importorskip(
        "fastxtend.callback.profiler", reason="pip install --no-deps fastxtend", exc_type=ImportError
    )
    theirs = profiler.SimpleProfilerCallback(show_report=False, drop_first_batch=False)
    loaders = DataLoaders(
        *(
            DataLoader(dataset(batches), bs=BATCH, num_workers=0, create_batch=slow_batch)
            for batches in (10, 10)
        )
    )
    subject = Learner(
        loaders,
        SlowModel(),
        loss_func=slow_loss,
        opt_func=partial(SlowOptimizer, cbs=[sgd_step]),
        cbs=[theirs, profiler.SimpleProfilerPostCallback(), TorchperfdCallback()],
    )
    drained: list[StepBatch] = []
    drain = Recorder.drain

    def keep(recorder: Recorder) -> list[StepBatch]:
        stretches = drain(recorder)
        drained.extend(stretches)
        return stretches

    monkeypatch.setattr(Recorder, "drain", keep)
    client = torchperfd.attach()
    fit(subject)
    client.finish()
    steps = unpack(drained, client.parts.instruments.names)
    apart = {}
    for kind, phase, their_name in (
        ("train", "data", "train_draw"),
        ("train", "forward", "train_forward"),
        ("train", "loss", "train_loss"),
        ("train", "backward", "train_backward"),
        ("train", "optimizer", "train_opt_step"),
        ("train", "zero_grad", "train_zero_grad"),
        ("validate", "data", "valid_draw"),
        ("validate", "forward", "valid_predict"),
        ("validate", "loss", "valid_loss"),
    ):
        own = [step.phases[phase] for step in steps if step.kind == kind]
        other = theirs._raw_values[their_name]
        assert sum(calls for calls, _ in own) == len(other) == EPOCHS * 10, (kind, phase)
        median, their_median = statistics.median(ns for _, ns in own) / 1e9, statistics.median(other)
        apart[kind, phase] = f"{median:.4f} s, theirs {their_median:.4f} s"
        if abs(median / their_median - 1) <= 0.05:
            print(kind, phase, apart.pop((kind, phase)), f"{median / their_median - 1:+.2%}")
    assert apart == {}
