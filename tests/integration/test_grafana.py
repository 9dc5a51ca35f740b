"""Dashboards on a simulated node, and alerts that fire in a real Prometheus."""

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from tests.metric_names import unknown
from tests.promql import queries
from tests.support.node import ROOT, Node, eventually
from tests.support.prometheus import Queried, start_prometheus

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus")]
DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "grafana" / "alerts" / "torchperfd.rules.yaml"

DOWN = "TorchperfdDaemonDown"

NO_PROCESS = "a simulated rank has no process"
NOTHING_HAPPENED = "nothing of the kind happens on the simulated node"
EMPTY = {
    "Captures by result": "no capture was requested",
    "Captures": "no capture was requested",
    "Triggers": "no trigger is configured",
    "Free disk for captures": "updated every minute, and there is no captures directory yet",
    "Uploads": "uploads are off",
    "Captures waiting for upload": "uploads are off",
    "Daemons that do not answer": NOTHING_HAPPENED,
    "Ranks missing by run": NOTHING_HAPPENED,
    "XIDs in the time range": NOTHING_HAPPENED,
    "Since the last XID of the hardware": NOTHING_HAPPENED,
    "CPUs of ranks": NO_PROCESS,
    "Memory of ranks": NO_PROCESS,
    "Ready and without a CPU": NO_PROCESS,
    "CPU": NO_PROCESS,
    "Waits for a CPU": NO_PROCESS,
    "Storage": NO_PROCESS,
    "Memory of the process": NO_PROCESS,
    "Hooks": NO_PROCESS,
    "Behind its peers": "no rank is late while no GPU is hot",
    "Ranks that the others wait for": "no rank is late while no GPU is hot",
    "GPU-hours lost by cause": "no cause has cost anything yet",
    "GPUs lost to causes": "no cause has cost anything yet",
    "Runs that lost most": "no cause has cost anything yet",
    "Hardware throttling": "no GPU is hot in the first minute",
    "Beside the steps": "the simulated job saves every few minutes",
    "Goodput": "time is settled a few seconds after the start",
    "Rank time by use": "time is settled a few seconds after the start",
}
"""Why panels may have nothing to show of the simulated node in its first minute."""


def short_rules(directory: Path) -> Path:
    """Copy the rules with seconds in place of minutes; thresholds and expressions stay."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[\d+[mh]\]", "[5s]", rule["expr"])
            rule["expr"] = re.sub(r"offset \d+[mh]", "offset 3s", rule["expr"])
            if "for" in rule:
                rule["for"] = "1s"
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def firing(prometheus: Queried, **labels: str) -> set[str]:
    """Return the names of the alerts that fire now and have these labels."""
    matchers = "".join(f',{name}="{value}"' for name, value in labels.items())
    found = prometheus.query(f'ALERTS{{alertstate="firing"{matchers}}}')
    return {each["metric"]["alertname"] for each in found}


Simulated = tuple[Node, Queried]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """The simulated node, and a Prometheus that scrapes it."""
    node = Node()
    node.start_daemon("--demo")
    directory = tmp_path_factory.mktemp("simulated")
    prometheus = start_prometheus(directory, {"torchperfd": node.metrics_port})
    try:
        yield node, prometheus
    finally:
        prometheus.stop()
        node.close()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_on_the_simulated_node_have_data(simulated: Simulated, path: Path) -> None:
    node, prometheus = simulated
    document = json.loads(path.read_text())
    rank = ".*" if path.stem == "run" else "5"
    asked = queries(document, run="demo", rank=rank, instance=f"127.0.0.1:{node.metrics_port}")
    assert len(asked) > 10
    expected = [query for query in asked if query.name.rpartition(" (")[0] not in EMPTY]
    assert len(expected) > len(asked) / 2
    # What has a reason to be empty is a valid query nevertheless: Prometheus refuses others.
    for query in asked:
        prometheus.query(query.expr)

    def unanswered() -> list[str]:
        return [query.name for query in expected if not prometheus.query(query.expr)]

    eventually(lambda: not unanswered(), 60, lambda: str(unanswered()))


def test_reasons_for_empty_panels_name_panels() -> None:
    documents = [json.loads(path.read_text()) for path in DASHBOARDS]
    names = {
        query.name.rpartition(" (")[0]
        for document in documents
        for query in queries(document, run="demo")
        if query.may_be_empty
    }
    assert set(EMPTY) <= names


def test_daemon_that_ends_is_down(tmp_path: Path) -> None:
    node = Node()
    node.start_daemon()
    prometheus = start_prometheus(tmp_path, {"torchperfd": node.metrics_port}, short_rules(tmp_path))
    try:
        eventually(
            lambda: prometheus.value('up{job="torchperfd"}') == 1 and DOWN not in firing(prometheus), 60, str
        )
        node.stop_daemon()
        eventually(lambda: DOWN in firing(prometheus), 60, str)
    finally:
        prometheus.stop()
        node.close()


RUN = {"run": "bert"}
GPU = {"gpu": "0", "gpu_uuid": "GPU-0"}


def series(seconds: float, *, faulty: bool) -> Mapping[str, float]:
    """Return the series of two ranks and a GPU some seconds after the start, with every fault or none."""
    now = time.time()
    bad = float(faulty)
    found: dict[str, float] = {}

    def put(name: str, value: float, /, **labels: str) -> None:
        inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
        found[f"torchperfd_{name}{{{inside}}}" if inside else f"torchperfd_{name}"] = value

    for rank in ("0", "1"):
        put("train_steps_total", 10 * seconds, **RUN, rank=rank)
        put("train_step_seconds_total", seconds, **RUN, rank=rank)
        put("train_phase_seconds_total", (0.05 + 0.5 * bad) * seconds, **RUN, rank=rank, phase="data")
        put("train_dataloader_ready_batches", 2 - 2 * bad, **RUN, rank=rank)
        put("train_world_size", 2 + 2 * bad, **RUN, rank=rank)
        put("train_rank_info", 1, **RUN, rank=rank, hooks="reference" if faulty else "native")
        put("train_state", 1, **RUN, rank=rank, state="training")
        put("train_last_step_timestamp_seconds", now - 1000 * bad, **RUN, rank=rank)
        put("client_overhead_ratio", 0.001 + 0.05 * bad, **RUN, rank=rank)
    put("train_unsupported_clients", bad, **RUN)
    put("train_verdict", 1, **RUN, cause="hang" if faulty else "none")
    put("train_step_part_seconds", 0.06, **RUN, part="computing", name="forward")
    put("train_step_part_seconds", 0.04, **RUN, part="uneven_work", name="")
    put("train_goodput_seconds_total", (0.95 - 0.5 * bad) * seconds, **RUN, bucket="productive")
    put("train_goodput_seconds_total", (0.05 + 0.5 * bad) * seconds, **RUN, bucket="checkpoint")
    if faulty:
        put("train_straggler_excess_seconds", 0.05, **RUN, rank="1")
        put("gpu_xid_last_timestamp_seconds", now - 5, **GPU, xid="79")
    put("gpu_up", 1 - bad, **GPU)
    put("gpu_allocation_info", 1, **GPU, allocator="slurm", allocation="77")
    put("gpu_utilization_ratio", 0.9 * (1 - bad), **GPU)
    put("gpu_throttle_seconds_total", 0.5 * bad * seconds, **GPU, reason="hw_thermal_slowdown")
    put("gpu_ecc_errors_total", bad * seconds, **GPU, type="uncorrected", scope="volatile")
    put("gpu_row_remap_pending", bad, **GPU)
    put("gpu_row_remap_failure", 0, **GPU)
    put("gpu_memory_used_bytes", 50 + 49 * bad, **GPU)
    put("gpu_memory_total_bytes", 100, **GPU)
    put("node_memory_available_bytes", 50 - 49 * bad)
    put("node_memory_total_bytes", 100)
    put("captures_disk_free_bytes", 50 - 49 * bad)
    put("captures_disk_size_bytes", 100)
    put("captures_uploads_total", bad * seconds, result="failed")
    put("captures_upload_pending", bad)
    put("capture_requests_total", bad * seconds, trigger="command", result="failed")
    put("collector_success", 1 - bad, collector="nvml")
    put("background_failures_total", bad * seconds, worker="retention")
    put("ingest_events_total", 10 * seconds)
    put("ingest_dropped_events_total", bad * seconds, where="ring")
    put("label_overflow_total", bad * seconds)
    return found


class Pages:
    """Two pages of metrics, one of a node with every fault and one of a healthy node."""

    def __init__(self) -> None:
        began = time.monotonic()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                faulty = self.server is servers["faulty"]
                shown = series(time.monotonic() - began + 100, faulty=faulty)
                body = "".join(f"{name} {value}\n" for name, value in shown.items()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        servers = {name: ThreadingHTTPServer(("127.0.0.1", 0), Handler) for name in ("faulty", "healthy")}
        self._servers = servers
        self.ports = {name: int(server.server_address[1]) for name, server in servers.items()}
        self._threads = [threading.Thread(target=server.serve_forever) for server in servers.values()]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both servers."""
        for server in self._servers.values():
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


ELSEWHERE = {"TorchperfdRunRegressed", "TorchperfdVersionSkew"}
"""They need a past of their own, or daemons of two builds; promtool has them."""


def test_alerts_fire_on_faults_and_not_without(tmp_path: Path, pages: Pages) -> None:
    rules = short_rules(tmp_path)
    groups = yaml.safe_load(rules.read_text())["groups"]
    names = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    expected = names - ELSEWHERE - {DOWN}
    assert len(expected) >= 10
    # Runs of the same name on two nodes are one run: each page has a Prometheus of its own.
    (tmp_path / "healthy").mkdir()
    faulty = start_prometheus(tmp_path, {"torchperfd": pages.ports["faulty"]}, rules)
    healthy = start_prometheus(tmp_path / "healthy", {"torchperfd": pages.ports["healthy"]}, rules)
    try:
        eventually(lambda: expected <= firing(faulty), 60, lambda: str(expected - firing(faulty)))
        # The healthy one has seen as much: its recording rules have results as well.
        eventually(lambda: healthy.query("run:torchperfd_train_goodput:ratio1h offset 3s"), 60, str)
        # A scrape that is late on a busy machine counts as a daemon that is down.
        assert healthy.query(f'ALERTS{{alertname!="{DOWN}"}}') == []
    finally:
        faulty.stop()
        healthy.stop()


@pytest.mark.parametrize("faulty", [True, False])
def test_scripted_pages_have_metrics_of_the_daemon(faulty: bool) -> None:
    assert {name: problems for name in series(1.0, faulty=faulty) if (problems := unknown(name))} == {}
