"""The trackers' own libraries, offline: what they have written is read back from disk."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import torchperfd
from torchperfd.loggers import MLflowLogger, TensorBoardLogger, WandbLogger

STEP_MS = "torchperfd/step_ms"


def train(logger: Any) -> torchperfd.Client:
    """Train a few steps under a client with this logger, and detach."""
    client = torchperfd.attach(loggers=[logger])
    with client.phase("aug <1>"):
        pass
    for _ in range(4):
        client.step(samples=8)
    client.detach()
    assert client.parts.instruments.faults.counts() == {}
    return client


def test_tensorboard(tmp_path: Path) -> None:
    # Imported here: all else takes less time than that.
    pytest.importorskip("torch.utils.tensorboard")
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    train(TensorBoardLogger(str(tmp_path)))
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert STEP_MS in events.Tags()["scalars"]
    scalar = events.Scalars("torchperfd/samples_per_second")[-1]
    assert scalar.step == 4
    assert scalar.value > 0
    (text,) = events.Tensors("torchperfd/report/text_summary")
    assert "| Phase | Action |" in text.tensor_proto.string_val[0].decode()


def test_tensorboard_with_the_scripts_own_writer(tmp_path: Path) -> None:
    writer: Any = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    train(TensorBoardLogger(writer=writer))
    writer.add_scalar("loss", 1.0, 5)
    writer.close()


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            train(MLflowLogger())
            mlflow.log_metric("loss", 1.0)
        client = mlflow.MlflowClient()
        metrics = client.get_run(run.info.run_id).data.metrics
        assert {"loss", STEP_MS, "torchperfd_phases/other_share"} <= set(metrics)
        assert client.get_metric_history(run.info.run_id, STEP_MS)[-1].step == 4
        artifacts = Path(run.info.artifact_uri.removeprefix("file://")) / "torchperfd"
        assert {each.name for each in artifacts.iterdir()} == {"report.md", "report.html", "report.csv"}
        assert (artifacts / "report.csv").read_text().startswith("phase,action,mean_seconds")
    finally:
        mlflow.set_tracking_uri(None)


def test_mlflow_names_are_ones_it_takes() -> None:
    from torchperfd.loggers.trackers import _mlflow_name

    assert _mlflow_name("torchperfd/step_ms") == "torchperfd/step_ms"
    assert _mlflow_name("torchperfd_phases/aug <1>") == "torchperfd_phases/aug _1_"
    assert _mlflow_name("torchperfd_phases/..") == "torchperfd_phases/_"


@pytest.mark.parametrize(("logger", "words"), [(MLflowLogger, "MLflow"), (WandbLogger, "W&B")])
def test_without_a_run_it_starts_none_and_says_so(
    logger: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(logger.__module__.rpartition(".")[2])
    train(logger())
    assert f"no {words} run is" in caplog.text


WANDB = """
import sys, time
import torchperfd
from torchperfd.loggers import WandbLogger

client = torchperfd.attach(loggers=[WandbLogger(every_seconds=0.01)])
import wandb

run = wandb.init(project="digits", dir=sys.argv[1], mode="offline")
for step in range(60):
    client.step(samples=8)
    run.log({"loss": step}, step=step)
    time.sleep(0.03)
"""


def test_wandb_without_finish_gets_our_numbers_at_exit(tmp_path: Path) -> None:
    """Our numbers join the script's rows, whose steps are untouched; at exit we come before W&B."""
    pytest.importorskip("wandb")
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = list(history(log))
    assert [(row["_step"], row["loss"]) for row in rows if "loss" in row] == [(n, n) for n in range(60)]
    ours = [row for row in rows if STEP_MS in row]
    assert len(ours) >= 2
    assert all(row["torchperfd/step"] - 1 <= row["_step"] for row in ours)
    assert any("torchperfd/report/path" in row for row in rows)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/torchperfd/report_[0-9]*.json")
    assert json.loads(table.read_text())["columns"][:3] == ["Phase", "Action", "Mean duration"]


def history(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's history from W&B's own log."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for payload in records(log.read_bytes()):
        record = protocol.Record.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def records(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of a LevelDB log: blocks of 32 KiB, after W&B's seven bytes."""
    position, payload = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, position)
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield payload
            payload = b""
