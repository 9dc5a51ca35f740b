from typing import Any

import pytest
import torch
from tests.frameworks.fits import BATCH, NoDataLoader, assert_has, calls, faults, loader, model, samples
from torch import nn

import torchperfd

pytest.importorskip("ignite.engine", reason="pip install pytorch-ignite")
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer

from torchperfd.integrations.ignite import EngineSession, attach

TRAIN, VALIDATE, EPOCHS = 6, 3, 2


def fit(
    follow: bool = True, accumulate: int = 1, train: Any = None, epoch_length: int | None = None
) -> tuple[EngineSession | None, list[float]]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    trainer = create_supervised_trainer(
        net, optimizer, nn.functional.cross_entropy, gradient_accumulation_steps=accumulate
    )
    evaluator = create_supervised_evaluator(net)
    session = None
    if follow:
        session = attach(trainer, net, job="digits", run="digits-1")
        attach(evaluator, net)
    losses: list[float] = []
    validate = loader(VALIDATE)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(validate))
    trainer.run(train or loader(TRAIN), max_epochs=EPOCHS, epoch_length=epoch_length)
    return session, losses


@pytest.mark.parametrize("epoch_length", [None, 4])
def test_every_step_and_phase_is_there(epoch_length: int | None) -> None:
    session, _ = fit(epoch_length=epoch_length)
    assert session is not None
    client = session.client
    steps, validated = EPOCHS * (epoch_length or TRAIN), EPOCHS * VALIDATE
    train = calls(client)
    assert_has(train, steps=steps, data=steps, forward=steps, loss=steps, backward=steps)
    assert_has(train, optimizer=steps, zero_grad=steps)
    assert_has(calls(client, "validate"), steps=validated, data=validated, forward=validated, backward=0)
    assert samples(client) == steps * BATCH
    assert faults(client) == {}
    assert client is not None
    assert not client.attached
    assert (client.run, client.parts.identity.job_name) == ("digits-1", "digits")


def test_gradient_accumulation_makes_one_step_of_several_batches() -> None:
    session, _ = fit(accumulate=2)
    assert session is not None
    steps = EPOCHS * TRAIN // 2
    seen = calls(session.client)
    assert_has(seen, steps=steps, optimizer=steps, zero_grad=steps, forward=2 * steps, backward=2 * steps)


def test_batches_that_no_data_loader_draws() -> None:
    session, _ = fit(train=NoDataLoader(TRAIN))
    assert session is not None
    steps = EPOCHS * TRAIN
    assert_has(calls(session.client), steps=steps, data=steps, forward=steps, optimizer=steps)
    assert samples(session.client) == steps * BATCH
    assert_has(calls(session.client, "validate"), steps=EPOCHS * VALIDATE)


def test_engines_need_no_attaching() -> None:
    client = torchperfd.attach()
    fit(follow=False)
    client.finish()
    steps = EPOCHS * TRAIN
    assert_has(calls(client), steps=steps, forward=steps, backward=steps, optimizer=steps)
    assert_has(calls(client, "validate"), steps=EPOCHS * VALIDATE)


def test_losses_are_the_same_bit_for_bit() -> None:
    assert fit()[1] == fit(follow=False)[1]


def test_an_engine_still_raises_what_its_handlers_raise() -> None:
    trainer = create_supervised_trainer(model(), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), nn.L1Loss())
    attach(trainer)

    @trainer.on(Events.ITERATION_STARTED)  # type: ignore[untyped-decorator]
    def fail(_: Any) -> None:
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        trainer.run(loader(1))


def test_a_failure_of_ours_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("torchperfd.integrations.ignite.drawn_by_torch", fail)
    session, losses = fit()
    assert session is not None
    assert len(losses) == EPOCHS * TRAIN
    assert faults(session.client) == {"integration ignite draw_begins": 10}
