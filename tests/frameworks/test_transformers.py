from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.fits import BATCH, assert_has, calls, faults, samples

import torchperfd

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("accelerate", reason="pip install transformers accelerate")
from torchperfd.integrations.transformers import TorchperfdCallback  # noqa: E402

TRAIN, VALIDATE, EPOCHS = 6, 3, 2


class Sentences(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(0, 50, (batches * BATCH, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0]) % 2}


class Losses(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [logs[name] for name in ("loss", "eval_loss", "grad_norm") if name in logs]


def fit(out: Path, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
        )
    )
    options = {
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        **options,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(out), **options),
        train_dataset=Sentences(TRAIN),
        eval_dataset=Sentences(VALIDATE),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_step_and_phase_is_there(tmp_path: Path) -> None:
    callback = TorchperfdCallback()
    trainer = fit(tmp_path, callback, run_name="bert-17")
    client = callback.client
    steps, validated = EPOCHS * TRAIN, EPOCHS * VALIDATE
    assert trainer.state.global_step == steps
    assert_has(calls(client), steps=steps, forward=steps, backward=steps, optimizer=steps)
    assert_has(calls(client, "validate"), steps=validated, data=validated, forward=validated, backward=0)
    assert samples(client) == steps * BATCH
    assert samples(client, "validate") == validated * BATCH
    assert faults(client) == {}
    assert client is not None
    assert not client.attached
    assert client.run == "bert-17"
    assert client.parts.identity.job_name == "BertForSequenceClassification"


def test_gradient_accumulation_makes_one_step_of_several_batches(tmp_path: Path) -> None:
    callback = TorchperfdCallback()
    trainer = fit(tmp_path, callback, gradient_accumulation_steps=2)
    steps = EPOCHS * TRAIN // 2
    assert trainer.state.global_step == steps
    assert_has(calls(callback.client), steps=steps, optimizer=steps, forward=2 * steps, backward=2 * steps)
    assert samples(callback.client) == EPOCHS * TRAIN * BATCH


def test_checkpoint_within_a_step_has_its_own_phase(tmp_path: Path) -> None:
    callback = TorchperfdCallback()
    fit(tmp_path, callback, save_strategy="steps", save_steps=4, logging_steps=2)
    assert_has(calls(callback.client), steps=EPOCHS * TRAIN)
    assert calls(callback.client)["checkpoint"] in (2, 3)  # of 4, 8, 12; the last may end the epoch
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


def test_the_launchers_name_outranks_run_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPERFD_RUN", "of-the-launcher")
    callback = TorchperfdCallback()
    fit(tmp_path, callback, run_name="mine", max_steps=1)
    assert callback.client is not None
    assert callback.client.run == "of-the-launcher"


def test_the_trainer_needs_no_callback(tmp_path: Path) -> None:
    client = torchperfd.attach()
    fit(tmp_path)
    client.finish()
    steps, validated = EPOCHS * TRAIN, EPOCHS * VALIDATE
    assert_has(calls(client), steps=steps, forward=steps, backward=steps, optimizer=steps)
    assert_has(calls(client, "validate"), steps=validated, forward=validated)
    assert samples(client) == steps * BATCH


def test_losses_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    ours, theirs = Losses(), Losses()
    fit(tmp_path, TorchperfdCallback(), ours)
    fit(tmp_path, theirs)
    assert ours.seen
    assert ours.seen == theirs.seen


def test_a_failure_of_ours_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = TorchperfdCallback()

    def fail() -> None:
        raise ValueError("ours")

    monkeypatch.setattr(callback.session, "between_loops", fail)
    assert fit(tmp_path, callback).state.global_step == EPOCHS * TRAIN
    assert faults(callback.client) == {
        "integration transformers on_epoch_end": 2,
        "integration transformers on_evaluate": 2,
        "integration transformers on_train_end": 1,
    }
