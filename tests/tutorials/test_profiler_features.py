"""The table of profiler features: each row is done by an exercise here, on one real run."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.node import ROOT, Node, eventually, new_node

from torchperfd_cli.main import cli

PAGE = ROOT / "docs" / "profiler-features.md"

SCRIPT = """
import json, sys
from pathlib import Path
import torch, torchperfd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class FileLogger:
    every_steps = 10
    def log_metrics(self, metrics, step):
        Path("metrics.json").write_text(json.dumps(metrics))
    def log_table(self, report):
        Path("report.txt").write_text(str(report))
        Path("report.md").write_text(report.to_markdown())
        Path("report.csv").write_text(report.to_csv())
    def close(self):
        pass

client = torchperfd.attach(loggers=[FileLogger()])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.rand(36, 64), torch.randint(0, 10, (36,))), batch_size=8)
while not Path("stop").exists():
    model.train()
    for inputs, labels in loader:
        with client.phase("augment"):
            inputs = inputs + 0.1 * torch.rand_like(inputs)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels)
"""
FUNCTIONS = """
import time
from torch.utils.data import DataLoader

def short(size=1):
    time.sleep(1e-4)

def long(size=1):
    time.sleep(1e-3 * size)

def make_loader():
    return DataLoader([0.0] * 64, batch_size=8)
"""


@dataclass
class Recorded:
    """What one run and one capture of it left."""

    node: Node
    folder: Path
    capture_id: str
    report: dict[str, Any] = field(default_factory=dict)

    def analyze(self, *options: str) -> str:
        """Run ``torchperfd analyze`` on the capture."""
        arguments = ["analyze", self.capture_id, "--captures-dir", str(self.node.captures), *options]
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    def rows(self, *options: str) -> list[dict[str, Any]]:
        """Return the operators of the analysis, in its order."""
        operators: list[dict[str, Any]] = json.loads(self.analyze("--json", *options))["ranks"][0][
            "operators"
        ]
        return operators

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events of the trace."""
        trace = self.node.captures / self.capture_id / "rank0.json"
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
        return events

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The answer of ``bench compare`` on two functions."""
        arguments = ("-p", "size=1,2", "--threads", "1,2", "--seconds", "0.02", "--rounds", "3")
        document: dict[str, Any] = self.node.json(
            *("bench", "compare", *(f"{self.folder}/functions.py:{name}" for name in ("short", "long"))),
            *arguments,
        )
        return document


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("features")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "functions.py").write_text(FUNCTIONS)
    with new_node() as node:
        node.start_daemon()
        command = [sys.executable, "-m", "torchperfd", "run", "--quiet", "--report", "run.json", "train.py"]
        with subprocess.Popen(command, cwd=folder, env=node.env) as process:
            try:
                eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 20, 120, node.log)
                wants = ("record-shapes", "with-stack", "profile-memory", "with-flops", "with-modules")
                answer = node.json("capture", "--steps", "5", *(f"--{each}" for each in wants))
                found = Recorded(node, folder, answer["capture_id"])
                (folder / "stop").touch()
                assert process.wait(120) == 0
            finally:
                process.kill()
        found.report = json.loads((folder / "run.json").read_text())["ranks"][0]
        yield found


def is_sorted_by(recorded: Recorded, word: str, key: Callable[[dict[str, Any]], float]) -> bool:
    values = [key(row) for row in recorded.rows("--sort-by", word)]
    return values == sorted(values, reverse=True) and len(values) > 10


def exercise_activities(recorded: Recorded) -> None:
    assert {event.get("cat") for event in recorded.events} >= {"cpu_op", "python_function"}


def exercise_schedule(recorded: Recorded) -> None:
    steps = {event["name"] for event in recorded.events if event["name"].startswith("ProfilerStep#")}
    assert len(steps) == 5


def exercise_repeat(recorded: Recorded) -> None:
    help_text = CliRunner().invoke(cli, ["capture", "--help"]).stdout
    assert "--every AGE" in help_text
    done = recorded.node.command("capture", "--every", "nonsense")
    assert done.returncode == 2


def exercise_step(recorded: Recorded) -> None:
    assert ".step()" in SCRIPT
    assert "client.step()" not in SCRIPT
    assert recorded.report["train"]["steps"] > 20


def exercise_record_function(recorded: Recorded) -> None:
    assert {"augment", "forward", "backward", "optimizer"} <= {row["name"] for row in recorded.rows()}
    assert {"augment", "forward"} <= set(recorded.report["train"]["phases"])


def exercise_shapes(recorded: Recorded) -> None:
    assert any([8, 64] in event.get("args", {}).get("Input Dims", []) for event in recorded.events)


def exercise_memory(recorded: Recorded) -> None:
    assert any(event["name"] == "[memory]" for event in recorded.events)
    refused = recorded.node.command("capture", "--kind", "memory")
    assert refused.returncode == 3  # the run has ended, and the option exists


def exercise_stacks(recorded: Recorded) -> None:
    assert any(
        "train.py" in event["name"] for event in recorded.events if event.get("cat") == "python_function"
    )


def exercise_flops_and_modules(recorded: Recorded) -> None:
    assert any("Concrete Inputs" in event.get("args", {}) for event in recorded.events)
    assert any(row["module"] for row in recorded.rows("--group-by", "module"))


def exercise_key_averages(recorded: Recorded) -> None:
    calls = {row["name"]: row["calls"] for row in recorded.rows()}
    assert calls["aten::addmm"] == sum(event["name"] == "aten::addmm" for event in recorded.events) >= 10


def exercise_row_limit(recorded: Recorded) -> None:
    assert "more operators; --limit" in recorded.analyze("--limit", "3")


def exercise_cpu_time_total(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "cpu_time_total", lambda row: row["total_cpu_us"])


def exercise_cpu_time(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "cpu_time", lambda row: row["total_cpu_us"] / row["calls"])


def exercise_self_cpu_time_total(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "self_cpu_time_total", lambda row: row["self_cpu_us"])


def exercise_cuda_times(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "cuda_time_total", lambda row: row["total_device_us"])
    assert is_sorted_by(recorded, "cuda_time", lambda row: row["total_device_us"] / row["calls"])
    assert is_sorted_by(recorded, "self_cuda_time_total", lambda row: row["self_device_us"])


def exercise_memory_usage(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "self_cpu_memory_usage", lambda row: row["self_cpu_memory_bytes"])
    assert is_sorted_by(recorded, "cpu_memory_usage", lambda row: row["total_cpu_memory_bytes"])


def exercise_count(recorded: Recorded) -> None:
    assert is_sorted_by(recorded, "count", lambda row: row["calls"])


def exercise_group_by_shape(recorded: Recorded) -> None:
    rows = [row for row in recorded.rows("--group-by", "shape") if row["name"] == "aten::addmm"]
    assert len({json.dumps(row["input_shapes"]) for row in rows}) == len(rows) >= 2


def exercise_group_by_stack(recorded: Recorded) -> None:
    rows = [row for row in recorded.rows("--group-by", "stack") if row["name"] == "aten::addmm"]
    assert any("linear.py" in json.dumps(row["stack"]) for row in rows)


def exercise_chrome_trace(recorded: Recorded) -> None:
    arguments = ("captures", "get", recorded.capture_id, "--output", str(recorded.folder / "copy"))
    done = recorded.node.command(*arguments)
    assert done.returncode == 0, done.stderr
    copies = list((recorded.folder / "copy").rglob("rank0.json*"))
    assert len(copies) == 1


def exercise_tensorboard(recorded: Recorded) -> None:
    """The plugin reads traces with the names of steps, operators and the process."""
    assert any(event.get("ph") == "X" and event.get("cat") == "cpu_op" for event in recorded.events)
    assert "mean step, in ms" in recorded.analyze()


def exercise_flame_graph(recorded: Recorded) -> None:
    page = recorded.folder / "page.html"
    recorded.analyze("--html", str(page))
    assert "flame" in page.read_text().lower()


def exercise_timer(recorded: Recorded) -> None:
    rows = recorded.compared["rows"]
    assert all(function["seconds"] > 0 for row in rows for function in row["functions"])


def exercise_timer_threads(recorded: Recorded) -> None:
    assert {row["threads"] for row in recorded.compared["rows"]} == {1, 2}


def exercise_compare(recorded: Recorded) -> None:
    assert {row["parameters"]["size"] for row in recorded.compared["rows"]} == {1, 2}
    assert len(recorded.compared["rows"]) == 4


def exercise_dataloader(recorded: Recorded) -> None:
    target = f"{recorded.folder}/functions.py:make_loader"
    document = recorded.node.json("bench", "dataloader", target, "--seconds", "0.05")
    assert {each["workers"] for each in document["settings"]} >= {0, 1}
    assert document["recommended"] is not None


def exercise_fit_rows(recorded: Recorded) -> None:
    rows = (recorded.folder / "report.csv").read_text().splitlines()
    found = {tuple(row.split(",")[:2]) for row in rows}
    assert {("fit", "fit"), ("fit", "train"), ("fit", "validate"), ("epoch", "epoch")} <= found


def exercise_actions(recorded: Recorded) -> None:
    named = {"data", "forward", "loss", "backward", "optimizer", "zero_grad"}
    assert named <= set(recorded.report["train"]["phases"])


def exercise_columns(recorded: Recorded) -> None:
    text = (recorded.folder / "report.txt").read_text()
    for column in ("Mean duration", "Std dev", "Calls", "Samples/s", "Total", "% of total"):
        assert column in text


def exercise_formats(recorded: Recorded) -> None:
    assert (recorded.folder / "report.md").read_text().count("| ---") >= 1
    assert (recorded.folder / "report.csv").read_text().startswith("phase,action,")
    assert recorded.report["train"]["steps"]


def exercise_samples_per_second(recorded: Recorded) -> None:
    metrics = json.loads((recorded.folder / "metrics.json").read_text())
    shares = {f"torchperfd_phases/{name}_share" for name in ("data", "forward", "backward", "optimizer")}
    assert {"torchperfd/samples_per_second", *shares} <= set(metrics)


def exercise_loggers(recorded: Recorded) -> None:
    from torchperfd import loggers

    assert {"WandbLogger", "TensorBoardLogger", "MLflowLogger"} <= set(dir(loggers))
    assert (recorded.folder / "report.txt").exists()  # by a logger of the script's own


EXERCISES: dict[str, Callable[[Recorded], None]] = {
    "`profile(activities=[CPU, CUDA])` around a loop": exercise_activities,
    "`schedule(wait=1, warmup=1, active=3)`": exercise_schedule,
    "`schedule(repeat=2)`": exercise_repeat,
    "`prof.step()`": exercise_step,
    '`record_function("inference")`': exercise_record_function,
    "`record_shapes=True`": exercise_shapes,
    "`profile_memory=True`": exercise_memory,
    "`with_stack=True`": exercise_stacks,
    "`with_flops=True`, `with_modules=True`": exercise_flops_and_modules,
    "`key_averages()`": exercise_key_averages,
    "`table(row_limit=10)`": exercise_row_limit,
    '`sort_by="cpu_time_total"`': exercise_cpu_time_total,
    '`sort_by="cpu_time"`': exercise_cpu_time,
    '`sort_by="self_cpu_time_total"`': exercise_self_cpu_time_total,
    '`sort_by="cuda_time_total"`, `"cuda_time"`, `"self_cuda_time_total"`': exercise_cuda_times,
    '`sort_by="self_cpu_memory_usage"`, `"cpu_memory_usage"`': exercise_memory_usage,
    '`sort_by="count"`': exercise_count,
    "`group_by_input_shape=True`": exercise_group_by_shape,
    "`group_by_stack_n=5`": exercise_group_by_stack,
    '`export_chrome_trace("trace.json")`': exercise_chrome_trace,
    "`tensorboard_trace_handler(dir)`": exercise_tensorboard,
    "`export_stacks`, a flame graph": exercise_flame_graph,
    "`timeit.Timer`, `benchmark.Timer`": exercise_timer,
    "`benchmark.Timer(num_threads=4)`": exercise_timer_threads,
    "`benchmark.Compare` over parameters": exercise_compare,
    "a DataLoader with different workers, by hand": exercise_dataloader,
    "the phases fit, epoch, train, valid": exercise_fit_rows,
    "the actions draw, forward, loss, backward, opt_step, zero_grad": exercise_actions,
    "mean, deviation, calls, samples/second, total, percent": exercise_columns,
    "`plain`, `markdown`, `save_csv`": exercise_formats,
    "`samples_per_second` of each action, while training": exercise_samples_per_second,
    '`logger_callback="wandb"`, and other loggers': exercise_loggers,
}


def test_each_row_of_the_page_has_an_exercise() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    features = [row for row in rows if row != "in a tutorial"]
    assert features == list(EXERCISES)
    assert len(set(EXERCISES.values())) == len(EXERCISES)


@pytest.mark.slow
@pytest.mark.parametrize("feature", EXERCISES)
def test_feature_of_a_row_is_there(feature: str, recorded: Recorded) -> None:
    EXERCISES[feature](recorded)
