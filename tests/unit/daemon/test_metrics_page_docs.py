"""docs/metrics.md: the catalogue is what is emitted, and every join works on a real Prometheus."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.metric_names import METRICS, unknown
from tests.support.node import ROOT, eventually, free_port

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.ownership import Owner
from torchperfd_daemon.store.model import KindTotal, RankIdentity, Totals
from torchperfd_daemon.store.store import Store

DOC: Final = (ROOT / "docs" / "metrics.md").read_text()
JOINS: Final = dict(re.findall(r"^### (.+?)\n.*?```promql\n(.+?)```", DOC, re.MULTILINE | re.DOTALL))
START: Final = 1_700_000_000
PACE: Final = 15
SCRAPES: Final = 41
UID: Final = "0d2cd4a6-5d7b-4b7e-9c1b-0123456789ab"

# As dcgm-exporter 3.3 and kube-state-metrics 2.10 show them, and a scrape labels them.
FOREIGN: Final = (
    [
        f'DCGM_FI_PROF_SM_ACTIVE{{gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:{gpu + 1:02X}:00.0",'
        f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="node-a",'
        f'DCGM_FI_DRIVER_VERSION="580.95.05",instance="node-a:9400",job="dcgm"}} 0.{gpu + 5}'
        for gpu in range(4)
    ]
    + [
        f'kube_pod_info{{namespace="{namespace}",pod="{pod}",uid="{uid}",host_ip="10.0.0.1",node="node-a",'
        f'created_by_kind="Job",instance="ksm:8080",job="kube-state-metrics"}} 1'
        for namespace, pod, uid in (("team-a", "bert-0", UID), ("team-b", "idle", "f" * 36))
    ]
    + [
        'ALERTS{alertname="TorchperfdRunInputBound",alertstate="firing",run="bert-17",severity="warning"} 1',
        'ALERTS{alertname="TorchperfdRunRegressed",alertstate="pending",run="bert-17",severity="warning"} 1',
        'ALERTS{alertname="TorchperfdRunInputBound",alertstate="firing",run="other",severity="warning"} 1',
        'ALERTS{alertname="TorchperfdOfUser",alertstate="firing",run="bert-17",user="ada"} 1',
        'user_team_info{user="ada",team="vision"} 1',
        'user_team_info{user="bob",team="speech"} 1',
    ]
)


def documented() -> dict[str, frozenset[str]]:
    """Return what the tables name, with the labels of the section and of the series."""
    found = {}
    base: frozenset[str] = frozenset()
    for line in DOC.partition("\n## Joins")[0].splitlines():
        if line.startswith("## "):
            base = frozenset(re.findall(r"\w+", (re.findall(r"`\{(.+)\}`", line) or [""])[0]))
        elif line.startswith("| `"):
            for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", line.split("|")[1]):
                found[f"torchperfd_{name}"] = base | frozenset(filter(None, labels.split(",")))
    return found


def test_the_catalogue_is_what_is_emitted() -> None:
    assert documented() == METRICS


def test_joins_name_only_what_is_emitted() -> None:
    assert {name: unknown(expr) for name, expr in JOINS.items() if unknown(expr)} == {}


class Gpus:
    """Four GPUs: 0 and 1 are rank 0's and 1's, 2 is assigned and idle, 3 is unassigned."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def families(self) -> list[Family]:
        gpu = ("gpu", "gpu_uuid")
        power = Family("gpu_power_watts", "Power.", "gauge", gpu)
        energy = Family("gpu_energy_joules", "Energy.", "counter", gpu)
        busy = Family("gpu_utilization_ratio", "Use.", "gauge", gpu)
        info = Family("gpu_info", "GPU.", "gauge", (*gpu, "model", "driver_version", "pci_bus_id"))
        given = Family("gpu_allocation_info", "Whose.", "gauge", (*gpu, "allocator", "allocation"))
        for index in range(4):
            labels = (str(index), f"GPU-{index}")
            power.add(100 * (index + 1), *labels)
            energy.add(100 * (index + 1) * self._seconds, *labels)
            busy.add(0.9 if index < 2 else 0.0, *labels)
            info.add(1, *labels, "H100", "580", str(index))
            if index < 3:
                given.add(1, *labels, "slurm", "77" if index < 2 else "78")
        return [power, energy, busy, info, given]


def page(seconds: float) -> str:
    """Return our page after some seconds: rank 0 and 1 of Slurm's job 77, rank 2 in a pod."""
    store = Store()
    for rank in range(3):
        record = store.join(
            RankIdentity(
                "bert-17",
                rank,
                job_name="bert",
                slurm_job_id="77" if rank < 2 else "",
                pod_uid=UID if rank == 2 else "",
            )
        )
        steps = int(2 * seconds)
        record.totals = Totals(train=KindTotal(steps=steps, ns=steps, tokens=500 * steps))

    def owner(identity: RankIdentity) -> Owner:
        gpu = f"GPU-{identity.rank}" if identity.rank < 2 else ""
        return Owner(identity.slurm_job_id, identity.pod_uid, gpu_uuid=gpu)

    training = TrainingMetrics(store, owner, users=lambda _: "ada")
    return MetricsPage([training.families, Gpus(seconds).families]).render("")[0].decode()


def recorded() -> str:
    """Return ten minutes of scrapes of ours and of the others', series by series."""
    series: dict[str, list[str]] = {}
    for scrape in range(SCRAPES):
        seconds = scrape * PACE
        for family in parse_text(page(seconds)):
            for sample in family.samples:
                labels = {**sample.labels, "instance": "node-a:9407", "job": "torchperfd"}
                shown = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
                key = f"{sample.name}{{{shown}}}"
                series.setdefault(key, []).append(f"{key} {sample.value} {START + seconds}")
        for line in FOREIGN:
            series.setdefault(line, []).append(f"{line} {START + seconds}")
    return "\n".join(line for key in sorted(series) for line in series[key]) + "\n# EOF\n"


Ask = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A Prometheus that has recorded the series; asks at the time of the last scrape."""
    tools = [shutil.which(name) for name in ("promtool", "prometheus")]
    directory = tmp_path_factory.mktemp("recorded")
    (directory / "recorded.txt").write_text(recorded())
    (directory / "prometheus.yml").write_text("global: {}\n")
    subprocess.run(
        [
            *(str(tools[0]), "tsdb", "create-blocks-from", "openmetrics"),
            *(str(directory / "recorded.txt"), str(directory / "tsdb")),
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(tools[1]),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'tsdb'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(expr: str) -> list[dict[str, Any]]:
        moment = START + (SCRAPES - 1) * PACE
        query = urllib.parse.urlencode({"query": expr, "time": moment})
        url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:  # which is all it says until it is ready
                    raise AssertionError(f"{expr}: {error.read().decode()}") from error
            return []
        except OSError:
            return []
        return found

    try:
        eventually(lambda: ask("torchperfd_train_rank_info"), 30, (directory / "log").read_text)
        yield ask
    finally:
        process.terminate()
        process.wait(15)


EXPECTED: Final[dict[str, dict[tuple[str, ...], float]]] = {
    "Steps with the job": {
        ("job_name=bert", "rank=0", "slurm_job_id=77"): 2,
        ("job_name=bert", "rank=1", "slurm_job_id=77"): 2,
        ("job_name=bert", "rank=2"): 2,
    },
    "Power of each rank's GPU": {
        ("gpu_uuid=GPU-0", "rank=0", "run=bert-17"): 100,
        ("gpu_uuid=GPU-1", "rank=1", "run=bert-17"): 200,
    },
    "What dcgm-exporter measures, by rank": {
        ("UUID=GPU-0", "job_name=bert", "rank=0", "run=bert-17"): 0.5,
        ("UUID=GPU-1", "job_name=bert", "rank=1", "run=bert-17"): 0.6,
    },
    "Steps by Kubernetes namespace": {("namespace=team-a",): 2},
    "Energy by Slurm job": {("allocation=77",): 300 * 300, ("allocation=78",): 300 * 300},
    "Allocated GPUs that are idle": {("allocation=78", "gpu_uuid=GPU-2"): 1},
    "GPUs without an owner": {("gpu_uuid=GPU-3", "model=H100"): 1},
    "Energy per token of a run": {("run=bert-17",): 300 / 3000},
    # Two GPUs at each of ten minutes; three ranks of the user.
    "GPU hours of a day by team": {("team=vision",): 2 * 10 / 60},
    "Alerts with the user": {("symptom=TorchperfdRunInputBound", "severity=warning", "user=ada"): 3},
}


@pytest.mark.needs("prometheus")
@pytest.mark.needs("promtool")
@pytest.mark.parametrize("name", JOINS)
def test_a_join_answers_what_it_says(prometheus: Ask, name: str) -> None:
    found = prometheus(JOINS[name])
    expected = EXPECTED[name]
    assert len(found) == len(expected)
    for wanted, value in expected.items():
        [match] = [
            each
            for each in found
            if set(wanted) <= {f"{label}={text}" for label, text in each["metric"].items()}
        ]
        assert float(match["value"][1]) == pytest.approx(value, rel=0.01)


def test_every_join_is_expected_to_answer_something() -> None:
    assert JOINS.keys() == EXPECTED.keys()


@pytest.mark.needs("promtool")
def test_alert_with_user_fires_once_as_a_rule(tmp_path: Path) -> None:
    """It reads the series of alerts, and so its own; another user has fewer ranks of a run of that name."""
    rules = [
        {"alert": "Slow", "expr": "max by (run) (slow) > 0", "labels": {"severity": "warning"}},
        {"alert": "OfUser", "expr": JOINS["Alerts with the user"]},
    ]
    ranks = [("ada", 0), ("ada", 1), ("bob", 0)]
    info = [f'torchperfd_train_rank_info{{run="bert",rank="{rank}",user="{user}"}}' for user, rank in ranks]
    labels = {"symptom": "Slow", "severity": "warning", "run": "bert", "user": "ada"}
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": "1x20"} for series in ('slow{run="bert"}', *info)
                ],
                "alert_rule_test": [
                    {"eval_time": "9m", "alertname": "OfUser", "exp_alerts": [{"exp_labels": labels}]}
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
