"""The metrics page: the whole of it as a golden file, its names, and what parsers make of it."""

import os
import platform
import re
import shutil
import subprocess
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.metric_names import METRICS
from tests.support.golden import check_golden
from tests.unit.daemon.host_tree import busy_host

from torchperfd._version import __revision__, __version__
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.process import HookState
from torchperfd.model.source_lines import SyncWait
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd.model.totals import CudaMemory, GcTotals, PhaseTotals
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.analyst import AnalysisCounts, RankShares
from torchperfd_daemon.captures.coordinator import CaptureCounts
from torchperfd_daemon.captures.retention_worker import RetentionCounts
from torchperfd_daemon.captures.uploader import UploadCounts
from torchperfd_daemon.collectors.base import Family, Sampler
from torchperfd_daemon.collectors.cgroup import CgroupCollector
from torchperfd_daemon.collectors.gpu_readings import FAMILIES, GpuCollector, GpuReading
from torchperfd_daemon.collectors.node import (
    CpuCollector,
    DiskCollector,
    MemoryCollector,
    NetworkCollector,
    PressureCollector,
)
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.collectors.process_usage import ProcessCollector
from torchperfd_daemon.collectors.procfs import parse_stat, read
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.lake.journal import Pending
from torchperfd_daemon.lake.uploader import LakeCounts
from torchperfd_daemon.metrics.comparison import ComparisonMetrics
from torchperfd_daemon.metrics.health import DaemonHealth
from torchperfd_daemon.metrics.page import (
    CONTENT_TYPES,
    MetricsPage,
    SeriesCap,
    analysis_metrics,
    background_metrics,
    by_age,
    capture_metrics,
    collector_metrics,
    fleet_metrics,
    goodput_metrics,
    lake_metrics,
    node_metrics,
    own_metrics,
    trigger_metrics,
    upload_metrics,
)
from torchperfd_daemon.metrics.training import DiagnosisMetrics, TrainingMetrics
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.ownership import Owner
from torchperfd_daemon.push.sender import EventCounts, ExportCounts
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.triggers.rules import Result

FORBIDDEN_LABELS = {"job", "instance", "pod", "namespace", "container", "pid"}


class FixedCollector:
    """Always the same GPU, node and so on."""

    def __init__(self, name: str, families: list[Family]) -> None:
        self.name = name
        self._families = families

    def sample(self) -> list[Family]:
        if not self._families:
            raise OSError("nothing here")
        return self._families


def family(name: str, kind: str, labels: Iterable[str], **samples: float) -> Family:
    made = Family(name, f"The {name}.", kind, tuple(labels))  # type: ignore[arg-type]
    for key, value in samples.items():
        made.add(value, *([key] if made.labels else []))
    return made


def host() -> FixedCollector:
    return FixedCollector(
        "host",
        [
            family("node_cpu_utilization_ratio", "gauge", [], _=0.25),
            family("node_network_bytes", "counter", ["direction"], receive=1e9, transmit=5),
        ],
    )


def store() -> Store:
    made = Store(clock=lambda: 0.0)
    for run, rank, state, waits in (
        ("bert-17", 0, State.TRAINING, 10),
        ("bert-17", 1, State.VALIDATING, 60),
        ('odd "name"\\', 0, State.STARTING, 0),
    ):
        record = made.join(
            RankIdentity(
                run=run,
                rank=rank,
                world_size=2,
                local_rank=rank,
                node_rank=0,
                job_name="bert",
                node="node-a",
                pid=4000 + rank,
                script="train.py",
                torch_version="2.13.0",
                python_version="3.11.7",
                slurm_job_id="77",
                pod_uid="",
            )
        )
        record.state = state
        record.framework = "lightning" if rank else ""
        record.client_version = "1.0.4" if rank else "1.2.0"
        if not waits:
            continue
        durations = array("q", [100_000_000, 120_000_000, 99_000_000])
        columns = {
            "data": array("q", [waits * 1_000_000] * 3),
            "forward": array("q", [40_000_000] * 3),
        }
        ends = array("q", [1_700_000_000_000_000_000 + rank] * 3)
        made.add_steps(record, StepColumns(ends, durations, columns))
        made.ingested_steps += 3
        record.totals = Totals(
            train=KindTotal(
                steps=3,
                ns=319_000_000,
                samples=96,
                phases={
                    "data": PhaseTotals(3, waits * 3_000_000, 1.0),
                    "forward": PhaseTotals(3, 120_000_000, 1.0),
                },
            ),
            validate=KindTotal(steps=rank, ns=rank * 50_000_000),
            recorded=3 + rank,
            dropped={"ring": rank},
        )
        if rank == 0:
            record.totals = on_a_gpu(record.totals)
    return made


def on_a_gpu(totals: Totals) -> Totals:
    """Return the totals of a client that reports every field."""
    train = totals.train
    forward = replace(train.phases["forward"], device_ns=150_000_000, device_calls=3)
    return replace(
        totals,
        train=replace(
            train,
            phases={**train.phases, "forward": forward},
            micro_batches=6,
            skipped=0,
            tokens=96 * 512,
        ),
        checkpoint=PhaseTotals(1, 250_000_000),
        background_saves=PhaseTotals(2, 3_500_000_000),
        sync_waits=(SyncWait("/home/a/train.py", 57, "item", 1_250_000_000),),
        gc=(GcTotals(3, 1_000_000), GcTotals(0, 0), GcTotals(1, 9_000_000)),
        loader_ready=0,
        cuda=CudaMemory(2**30, 2**31, 2**30 + 4096),
        host_memory=HostMemory(2**29, 2**30),
        flops_per_step=1e12,
        peak_flops=1e14,
        overhead=0.0031,
        degradation_level=1,
        hooks=(HookState("loader"), HookState("forward", "this torch has no Module._compiled_call_impl")),
    )


def gpus() -> GpuCollector:
    """Return a GPU that reports every value, with a rank on it."""
    gpu = GpuReading("0", "GPU-0", process_bytes={os.getpid(): 2**30})
    for name, (_, _, extra) in FAMILIES.items():
        gpu.put(name, 1, *extra)
    me = RankProcess("bert-17", 0, os.getpid(), 0, parse_stat(read("/proc/self/stat")).start_ticks)

    class OneOfAll(GpuCollector):
        name = "gpus"

        def read(self) -> list[GpuReading]:
            return [gpu]

    return OneOfAll(lambda: [me])


def ownership() -> FixedCollector:
    family = Family("gpu_allocation_info", "Whose.", "gauge", ("gpu", "gpu_uuid", "allocator", "allocation"))
    family.add(1, "0", "GPU-0", "slurm", "77")
    return FixedCollector("ownership", [family])


def owner(identity: RankIdentity) -> Owner:
    return Owner(
        slurm_job_id=identity.slurm_job_id,
        torchelastic_run_id="elastic-5",
        gpu_uuid=f"GPU-{identity.rank}",
    )


def counts() -> CaptureCounts:
    return CaptureCounts(
        requests={("command", "complete"): 2, ("script", "failed"): 1},
        bytes=123456,
        active=1,
        last_success_unix_seconds=1_700_000_100.5,
    )


def holding() -> RetentionCounts:
    return RetentionCounts(
        captures=12,
        bytes=9_000_000,
        disk_free_bytes=40_000_000_000,
        disk_size_bytes=100_000_000_000,
        removed={"age": 0, "count": 3, "bytes": 1, "reserve": 0},
    )


def analyses() -> AnalysisCounts:
    newest = {
        "bert-17": (RankShares(0, 0.5, 0.125, 0.125, 0.25), RankShares(1, 0.25, 0.5, 0.0, 0.25)),
        "gone": (RankShares(0, 1.0, 0.0, 0.0, 0.0),),
    }
    return AnalysisCounts({"analysed": 3, "failed": 1, "dropped": 0}, newest, 1_700_000_300.0)


def uploads() -> UploadCounts:
    return UploadCounts({"uploaded": 4, "failed": 2, "refused": 0}, 7_000_000, 3, 1_700_000_200.0)


def history() -> LakeCounts:
    rows = {"recorded": 900, "sent": 700, "dropped": 20}
    return LakeCounts(rows, 60_000, Pending(180, 9_000), 1_700_000_250.0)


class Observed(Observer):
    """Holds the verdicts on both runs: one of them is slow, the other hangs."""

    def __init__(self) -> None:
        pass

    def verdict(self, run: str) -> Verdict | None:
        parts = (
            Part(PartKind.COMPUTING, "forward", 0.05),
            Part(PartKind.LATE_RANK, "", 0.03, 1),
            Part(PartKind.EXCHANGE, "", 0.02),
        )
        account = Account(0.1, 0.1, parts, (Part(PartKind.DATA, "", 0.01),))
        slow = Verdict(Cause.SLOW_RANK, run, "node-a", 1, "forward", "", 0.03, "", account=account)
        hangs = Verdict(Cause.HANG, run, "node-a", 0, stalled_seconds=12.0, unseen_ranks=1)
        return slow if run == "bert-17" else hangs

    def device_work(self, rank: Rank) -> RankWork:
        times = {"forward": np.array([0.05, 0.06] * 3), "collective_wait": np.full(6, 0.02)}
        return RankWork(rank.identity.rank, times, are_means=True)

    def lost_seconds(self) -> dict[str, Mapping[Cause, float]]:
        return {"bert-17": {Cause.SLOW_RANK: 4.5, Cause.HANG: 60.0}}

    def stragglers(self) -> dict[str, Mapping[int, float]]:
        return {"bert-17": {1: 0.03}}


def health_of_daemon(proc: Path) -> DaemonHealth:
    """Return the health of a daemon that has answered calls; its process is files in a directory."""
    process = proc / "self"
    (process / "fd").mkdir(parents=True)
    for number in range(3):
        (process / "fd" / str(number)).touch()
    (proc / "stat").write_text("cpu 1 2 3\nbtime 1700000000\n")
    ticks = os.sysconf("SC_CLK_TCK")
    resident = 2**21 // os.sysconf("SC_PAGESIZE")
    later = f"{7 * ticks} {5 * ticks} 0 0 20 0 9 0 {30 * ticks} 200000000 {resident}"
    (process / "stat").write_text(f"9 (torchperfd) S {'0 ' * 10}{later} 0\n")
    (process / "limits").write_text("Max open files  1024  4096  files\n")
    health = DaemonHealth(str(proc))
    health.calls.ended.update({("Control/ListRuns", "OK"): 5, ("Control/GetRun", "NOT_FOUND"): 1})
    health.calls.seconds.update({"Control/ListRuns": 0.25, "Control/GetRun": 0.125})
    return health


def page_of(directory: Path, *, essential_only: bool = False) -> MetricsPage:
    """A page over two runs, a good collector and a failing one, at fixed times."""
    samplers = []
    for collector in (host(), FixedCollector("nvml", []), gpus(), ownership()):
        moments = iter((5.0, 5.25))
        sampler = Sampler(collector, 1.0, lambda moments=moments: next(moments), lambda: 1_700_000_050.0)  # type: ignore[misc]
        sampler.sample_once()
        samplers.append(sampler)
    kept = store()
    return MetricsPage(
        [
            TrainingMetrics(kept, owner, essential_only=essential_only).families,
            DiagnosisMetrics(kept, Observed()).families,
            ComparisonMetrics(kept, Observed()).families,
            partial(node_metrics, samplers),
            partial(collector_metrics, samplers),
            partial(own_metrics, kept),
            partial(capture_metrics, counts(), holding()),
            partial(upload_metrics, uploads()),
            ExportCounts(last_success_unix_seconds=1_700_000_030.0).families,
            partial(lake_metrics, history()),
            EventCounts().families,
            partial(fleet_metrics, lambda: 3, lambda: 2),
            partial(analysis_metrics, kept, analyses()),
            health_of_daemon(directory).families,
            partial(trigger_metrics, {("slow", Result.FIRED): 2, ("slow", Result.COOLDOWN): 1}),
            partial(
                background_metrics,
                [WorkerHealth("retention", 2, 1_700_000_040.0), WorkerHealth("uploads", 1)],
            ),
            partial(goodput_metrics, lambda: {"bert-17": dict.fromkeys(Bucket, 12.5)}),
        ],
        SeriesCap(1000, lambda: by_age(kept)),
        essential_only=essential_only,
    )


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MetricsPage:
    """A page of a daemon whose version and Python are fixed."""
    monkeypatch.setattr("torchperfd_daemon.metrics.page.__version__", "1.2.3")
    monkeypatch.setattr("torchperfd_daemon.metrics.training.__version__", "1.2.3")
    monkeypatch.setattr("torchperfd_daemon.metrics.page.__revision__", "6ba749a4c0de")
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.0")
    return page_of(tmp_path)


@pytest.fixture
def text(page: MetricsPage) -> str:
    return page.render("")[0].decode()


def test_the_page_is_the_golden_file(text: str) -> None:
    check_golden("metrics.txt", text)


def test_a_new_store_shows_only_what_is_always_there() -> None:
    empty = Store()
    page = MetricsPage(
        [
            TrainingMetrics(empty).families,
            partial(node_metrics, []),
            partial(own_metrics, empty),
            partial(capture_metrics, CaptureCounts(), RetentionCounts()),
        ]
    )
    body = page.render("")[0].decode()
    lines = [line for line in body.splitlines() if not line.startswith("#")]
    assert lines == [
        f'torchperfd_build_info{{python_version="{platform.python_version()}",revision="{__revision__}",'
        f'version="{__version__}"}} 1.0',
        "torchperfd_clients 0.0",
        "torchperfd_ingest_events_total 0.0",
        'torchperfd_ingest_dropped_events_total{where="ring"} 0.0',
        'torchperfd_ingest_dropped_events_total{where="outbox"} 0.0',
        "torchperfd_capture_bytes_total 0.0",
        "torchperfd_capture_active 0.0",
        "torchperfd_captures 0.0",
        "torchperfd_captures_bytes 0.0",
        'torchperfd_captures_removed_total{reason="age"} 0.0',
        'torchperfd_captures_removed_total{reason="count"} 0.0',
        'torchperfd_captures_removed_total{reason="bytes"} 0.0',
        'torchperfd_captures_removed_total{reason="reserve"} 0.0',
    ]


def test_a_rank_that_is_gone_has_no_series() -> None:
    now = [0.0]
    kept = Store(grace_seconds=60, clock=lambda: now[0])
    rank = kept.join(RankIdentity("bert-17", 0))
    kept.add_steps(rank, StepColumns(array("q", [1]), array("q", [1]), {}))
    page = MetricsPage([TrainingMetrics(kept).families])
    kept.leave(rank)
    now[0] = 60.0
    assert b"torchperfd_train_steps_total{" in page.render("")[0], "one more scrape may see it"
    now[0] = 60.1
    assert page.render("")[0] == b""


@pytest.mark.parametrize("kind", CONTENT_TYPES)
def test_the_scraper_chooses_the_format(page: MetricsPage, kind: str) -> None:
    body, content_type = page.render(f"{kind};version=1.0.0")
    assert content_type.startswith(kind)
    assert body.endswith(b"# EOF\n") == (kind != "text/plain")


def test_both_formats_parse_to_the_same_samples(page: MetricsPage, text: str) -> None:
    def samples(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    openmetrics = page.render("application/openmetrics-text;version=1.0.0")[0].decode()
    plain = samples(parse_text(text))
    parsed: Iterable[Metric] = openmetrics_parser.text_string_to_metric_families(openmetrics)  # type: ignore[no-untyped-call]
    assert samples(parsed) == plain
    assert len(plain) == len([line for line in text.splitlines() if not line.startswith("#")])
    assert plain["torchperfd_train_steps_total", frozenset({("run", "bert-17"), ("rank", "1")})] == 3
    verdict = frozenset({("run", "bert-17"), ("cause", "slow rank")})
    assert plain["torchperfd_train_verdict", verdict] == 1


def test_phases_sum_to_what_was_given_and_validate_is_apart(text: str) -> None:
    found = {
        (sample.labels["rank"], sample.labels["phase"]): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "torchperfd_train_phase_seconds_total" and sample.labels["run"] == "bert-17"
    }
    assert found == {
        ("0", "data"): 0.03,
        ("0", "forward"): 0.12,
        ("1", "data"): 0.18,
        ("1", "forward"): 0.12,
        ("1", "validate"): 0.05,
    }


def test_totals_that_arrive_during_rendering_wait_for_next_page() -> None:
    training = store()
    counted = next(training.ranks()).totals.train
    seconds: dict[str, float] = {}
    for shown in TrainingMetrics(training).families():
        assert isinstance(shown, Family) or shown.type == "histogram"
        if isinstance(shown, Family):
            seconds[shown.name] = sum(
                value for labels, value in shown.samples if labels[:2] == ("bert-17", "0")
            )
        rank = next(training.ranks())
        newer = replace(
            rank.totals.train, ns=rank.totals.train.ns * 2, phases={"data": PhaseTotals(6, 10**9)}
        )
        rank.totals = replace(rank.totals, train=newer)
    assert seconds["train_step_seconds"] == counted.ns / 1e9
    assert seconds["train_phase_seconds"] == sum(phase.ns for phase in counted.phases.values()) / 1e9


def test_what_a_rank_does_not_know_has_no_series(text: str) -> None:
    ranks: dict[str, set[str]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            if sample.labels.get("run") == "bert-17" and "rank" in sample.labels:
                ranks.setdefault(sample.name, set()).add(sample.labels["rank"])
    alone = {name for name, known in ranks.items() if known == {"0"}}
    assert alone == {
        "torchperfd_process_gpu_memory_bytes",
        "torchperfd_train_own_work_seconds",
        "torchperfd_train_peer_wait_seconds",
        "torchperfd_train_own_work_error_seconds",
        "torchperfd_train_tokens_total",
        "torchperfd_train_micro_batches_total",
        "torchperfd_train_skipped_optimizer_steps_total",
        "torchperfd_train_phase_device_seconds_total",
        "torchperfd_train_checkpoint_seconds_total",
        "torchperfd_train_background_save_seconds_total",
        "torchperfd_train_sync_wait_seconds_total",
        "torchperfd_train_gc_seconds_total",
        "torchperfd_train_dataloader_ready_batches",
        "torchperfd_train_cuda_allocated_bytes",
        "torchperfd_train_cuda_reserved_bytes",
        "torchperfd_train_cuda_peak_bytes",
        "torchperfd_train_host_memory_bytes",
        "torchperfd_train_step_flops",
        "torchperfd_train_model_flops_utilization_ratio",
        "torchperfd_client_overhead_ratio",
        "torchperfd_client_shed_tiers",
        "torchperfd_client_hook_active",
    }


def test_utilization_is_of_recent_steps_and_needs_a_peak() -> None:
    kept = Store()
    rank = kept.join(RankIdentity("r", 0))
    page = MetricsPage([TrainingMetrics(kept).families])
    name = b"torchperfd_train_model_flops_utilization_ratio{"

    rank.totals = Totals(flops_per_step=1e12, peak_flops=1e14)
    assert name not in page.render("")[0], "no step was seen"
    kept.add_steps(rank, StepColumns(array("q", [1, 2]), array("q", [10_000_000, 30_000_000]), {}))
    assert name + b'rank="0",run="r"} 0.5' in page.render("")[0]
    rank.totals = Totals(flops_per_step=1e12)
    assert name not in page.render("")[0]
    assert b"torchperfd_train_step_flops{" in page.render("")[0]


def test_degradation_shows_before_its_cost_is_known() -> None:
    kept = Store()
    kept.join(RankIdentity("r", 0)).totals = Totals(degradation_level=2)
    body = MetricsPage([TrainingMetrics(kept).families]).render("")[0]
    assert b'torchperfd_client_shed_tiers{rank="0",run="r"} 2.0' in body
    assert b"torchperfd_client_overhead_ratio" not in body


def emitted(text: str, tmp_path: Path, *, essential_only: bool = False) -> dict[str, tuple[str, set[str]]]:
    """Return kind and labels of every metric: those of the page and those of the real collectors."""
    tree = busy_host(tmp_path)
    cpu = CpuCollector(tree.proc)
    cpu.sample()
    tree.write("proc/stat", "cpu 2 0 0 2 0 0 0 0\n")

    class Real:
        def families(self) -> list[Family]:
            return [
                *cpu.sample(),
                *MemoryCollector(tree.proc).sample(),
                *DiskCollector(tree.proc, tree.sys).sample(),
                *NetworkCollector(tree.proc, tree.sys).sample(),
                *PressureCollector(tree.proc).sample(),
                *ProcessCollector(lambda: [tree.rank(100)], tree.proc, tree.sys).sample(),
                *CgroupCollector(lambda: [tree.rank(100)], tree.proc, tree.sys / "fs/cgroup").sample(),
            ]

    real = MetricsPage([Real().families], essential_only=essential_only).render("")[0].decode()
    found: dict[str, tuple[str, set[str]]] = {}
    for metric in (*parse_text(text), *parse_text(real)):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        found[name] = (metric.type, labels)
    return found


def test_metrics_and_catalogue_agree_in_names_and_labels(text: str, tmp_path: Path) -> None:
    assert {name: labels for name, (_, labels) in emitted(text, tmp_path).items()} == METRICS


def test_names_follow_the_conventions(text: str, tmp_path: Path) -> None:
    units = "seconds|bytes|ratio|celsius|watts|joules|hertz|info"
    counted = (
        "steps|samples|tokens|batches|flops|tiers|events|requests|clients|size|state|verdict|active|success"
        "|up|pending|rows|failure|failures|errors|overflow|switches|cpus|cores|fds|captures|removed|uploads"
        "|analyses|triggers|calls|peers|messages|points|ranks"
    )
    odd = re.compile(
        r"(?i)percent|milli|micro(?!_batches_)|nano|_(ms|us|ns|kb|mb|mib|gb|gib|minutes|mhz|mw)(_|$)"
    )
    for name, (kind, labels) in emitted(text, tmp_path).items():
        assert re.fullmatch(r"torchperfd_[a-z][a-z0-9_]*", name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert not odd.search(name), name
        last = name.removesuffix("_total").rpartition("_")[2]
        assert re.fullmatch(f"{units}|{counted}", last), f"{name} ends in no unit and counts nothing"
        assert not labels & FORBIDDEN_LABELS, name
        assert kind == "gauge" or not name.endswith("_info"), name


def test_training_series_carry_run_and_rank_only_info_has_more(text: str) -> None:
    for family in parse_text(text):
        for sample in family.samples:
            if not family.name.startswith(("torchperfd_train_", "torchperfd_client_", "torchperfd_process_")):
                assert "run" not in sample.labels
                continue
            extra = set(sample.labels) - {"run", "rank"}
            if family.name == "torchperfd_train_rank_info":
                assert {"node", "job_name", "slurm_job_id", "gpu_uuid", "torchelastic_run_id"} <= extra
            else:
                assert extra <= {
                    "phase",
                    "state",
                    "cause",
                    "blamed_rank",
                    "part",
                    "name",
                    "bucket",
                    "le",
                    "hook",
                }, family.name


def test_odd_names_are_escaped(text: str) -> None:
    runs = {
        sample.labels["run"]
        for family in parse_text(text)
        for sample in family.samples
        if "run" in sample.labels
    }
    assert runs == {"bert-17", 'odd "name"\\'}


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_to_object_to(text: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_parts_of_a_step_keep_their_time_beyond_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(PartKind.COMPUTING, f"phase {number}", 1 + number) for number in range(40))
    verdict = Verdict(Cause.NONE, "r", "", None, "", "", 0.0, "", account=Account(820.0, 820.0, parts))
    monkeypatch.setattr(Observed, "verdict", lambda *_: verdict)
    store = Store()
    store.join(RankIdentity("r", 0))
    text = MetricsPage([DiagnosisMetrics(store, Observed()).families]).render("")[0].decode()
    values = {
        sample.labels["name"]: sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "torchperfd_train_step_part_seconds"
    }
    assert len(values) == 33
    assert sum(values.values()) == 820.0
    assert values[""] == sum(range(1, 9))
