import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.frameworks.fits import BATCH, NoDataLoader, assert_has, calls, faults, loader, model, samples
from torch import nn

import torchperfd
from torchperfd.steps.loop import Loop

pl = pytest.importorskip("lightning.pytorch", reason="pip install lightning")
from torchperfd.integrations.lightning import Callback, Profiler  # noqa: E402

TRAIN, VALIDATE, SANITY, EPOCHS = 6, 3, 2, 2


class Classifier(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.model = model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        with self.trainer.profiler.profile("my own"):
            return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.filterwarnings("ignore")
def fit(
    *callbacks: Any, manual: bool = False, train: Any = None, validate: Any = None, **options: Any
) -> Classifier:
    pl.seed_everything(0, verbose=False)
    module = Classifier(manual)
    options = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        **options,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **options)
    trainer.fit(module, train or loader(TRAIN), validate or loader(VALIDATE))
    return module


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("how", ["callback", "profiler", "both"])
def test_every_step_and_phase_is_there(how: str) -> None:
    profiler, callback = Profiler(), Callback()
    module = fit(*([callback] if how != "profiler" else []), profiler=profiler if how != "callback" else None)
    client = callback.client if how == "callback" else profiler.client
    steps = EPOCHS * TRAIN
    assert module.trainer.global_step == steps
    train = calls(client)
    assert_has(train, steps=steps, data=steps, forward=steps, backward=steps, optimizer=steps, h2d=steps)
    assert_has(train, lr_scheduler=steps, **{"my own": steps})
    # Ahead of each validation, Lightning zeroes gradients once more.
    assert_has(train, zero_grad=steps + EPOCHS)
    validated = SANITY + EPOCHS * VALIDATE
    validate = calls(client, "validate")
    assert_has(validate, steps=validated, data=validated, forward=validated, backward=0, optimizer=0)
    assert samples(client) == steps * BATCH
    assert samples(client, "validate") == validated * BATCH
    assert faults(client) == {}
    assert client is not None
    assert not client.attached
    assert client.parts.identity.job_name == "Classifier"


def test_gradient_accumulation_makes_one_step_of_several_batches() -> None:
    callback = Callback()
    module = fit(callback, accumulate_grad_batches=2)
    steps = EPOCHS * TRAIN // 2
    assert module.trainer.global_step == steps
    assert_has(calls(callback.client), steps=steps, optimizer=steps, forward=2 * steps, backward=2 * steps)
    assert_has(calls(callback.client, "validate"), steps=SANITY + EPOCHS * VALIDATE)


def test_manual_optimization() -> None:
    callback = Callback()
    fit(callback, manual=True)
    steps = EPOCHS * TRAIN
    train = calls(callback.client)
    assert_has(train, steps=steps, forward=steps, loss=steps, backward=steps, optimizer=steps)
    assert_has(calls(callback.client, "validate"), steps=SANITY + EPOCHS * VALIDATE)


def test_validation_within_an_epoch() -> None:
    callback = Callback()
    fit(callback, val_check_interval=2, max_epochs=1)
    assert_has(calls(callback.client), steps=TRAIN, forward=TRAIN)
    assert_has(calls(callback.client, "validate"), steps=SANITY + TRAIN // 2 * VALIDATE)


def test_batches_that_no_data_loader_draws() -> None:
    callback = Callback()
    fit(callback, train=NoDataLoader(TRAIN))
    steps = EPOCHS * TRAIN
    assert_has(calls(callback.client), steps=steps, data=steps, optimizer=steps)
    assert samples(callback.client) == steps * BATCH


def test_checkpoint_within_a_step_has_its_own_phase(tmp_path: Any) -> None:
    callback = Callback()
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(callback, saver, enable_checkpointing=True)
    assert calls(callback.client)["checkpoint"] > 0
    assert_has(calls(callback.client), steps=EPOCHS * TRAIN)
    assert len(list(tmp_path.glob("*.ckpt"))) == EPOCHS * TRAIN // 2


def test_more_callbacks_than_phases() -> None:
    others = [type(f"Callback{number}", (pl.Callback,), {})() for number in range(20)]
    callback = Callback()
    fit(callback, *others)
    assert_has(calls(callback.client), steps=EPOCHS * TRAIN, forward=EPOCHS * TRAIN)
    assert faults(callback.client) == {}


def test_the_users_profiler_goes_on_and_comes_back() -> None:
    theirs = pl.profilers.SimpleProfiler()
    callback = Callback()
    module = fit(callback, profiler=theirs)
    assert module.trainer.profiler is theirs
    assert len(theirs.recorded_durations["run_training_batch"]) == EPOCHS * TRAIN
    assert_has(calls(callback.client), steps=EPOCHS * TRAIN)


def test_the_users_client_stays() -> None:
    client = torchperfd.attach()
    callback = Callback()
    fit(callback)
    assert callback.client is client
    assert client.attached
    first = calls(client)
    time.sleep(0.01)
    assert calls(client) == first


def test_losses_are_the_same_bit_for_bit() -> None:
    assert fit(Callback(), profiler=Profiler()).losses == fit().losses


def test_a_failure_of_ours_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(Loop, "forward_begin", fail)
    callback = Callback()
    module = fit(callback)
    assert module.trainer.global_step == EPOCHS * TRAIN
    assert faults(callback.client)["hook forward"] == 10


def test_an_interrupted_fit_gives_everything_back() -> None:
    class Stop(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("theirs")

    callback = Callback()
    with pytest.raises(RuntimeError, match="theirs"):
        fit(callback, Stop())
    assert callback.client is not None
    assert not callback.client.attached
