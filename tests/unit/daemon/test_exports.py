"""What the daemon exports: with some of its collectors, at the level essential, and of other versions."""

import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.metric_names import METRICS, selectors
from tests.support.node import ROOT
from tests.unit.daemon.test_metrics_page import Observed, emitted, page_of, store

from torchperfd_daemon.config.options import COLLECTORS, ESSENTIAL, FULL, ServeSettings
from torchperfd_daemon.metrics.page import ESSENTIAL_FAMILIES, MetricsPage
from torchperfd_daemon.metrics.training import TrainingMetrics, are_neighbours
from torchperfd_daemon.server.exports import Exports
from torchperfd_daemon.server.workers import NodeSamplers
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store

RULES: Final = yaml.safe_load((ROOT / "grafana" / "alerts" / "torchperfd.rules.yaml").read_text())
DOC: Final = (ROOT / "docs" / "metrics.md").read_text()
OF_SCRAPE: Final = {"job", "instance"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: MetricsPage) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(page.render("")[0].decode())
        for sample in family.samples
    }


# Collectors


def samplers_of(collectors: Collection[str], kept: Store) -> NodeSamplers:
    return NodeSamplers(kept, 60, simulated=True, names_users=False, collectors=collectors)


@pytest.mark.parametrize(
    ("collectors", "names"),
    [
        (COLLECTORS, ["cpu", "memory", "disk", "network", "pressure", "process", "cgroup"]),
        (("memory", "steps"), ["memory"]),
        (("process",), ["process", "cgroup"]),
        (("steps", "self"), []),
    ],
)
def test_collectors_that_are_off_have_no_sampler(collectors: tuple[str, ...], names: list[str]) -> None:
    samplers = samplers_of(collectors, Store())
    of_others = {"gpu": "simulated", "owners": "ownership"}
    assert [each.name for each in samplers.samplers] == [
        *names,
        *(name for collector, name in of_others.items() if collector in collectors),
    ]
    assert len(samplers.watched) == bool(names)


def test_collectors_that_are_off_have_no_thread() -> None:
    before = threading.active_count()
    samplers = samplers_of(("gpu", "steps"), Store())
    samplers.start()
    try:
        assert threading.active_count() == before + 1
    finally:
        samplers.stop()


def exported(*collectors: str, level: str = FULL) -> set[str]:
    """Return the names on a page with the sources that each daemon has."""
    kept = store()
    samplers = samplers_of(collectors, kept)
    for sampler in samplers.samplers:
        sampler.sample_once()
    settings = ServeSettings("", Path(), collectors=collectors, metrics_level=level)
    page = Exports(settings, kept, samplers, Observed()).page()
    return {name.removeprefix("torchperfd_") for name, _ in samples(page)}


@pytest.mark.parametrize(
    ("collector", "pattern"),
    [
        ("memory", "node_memory_.*"),
        ("gpu", "gpu_.*"),
        ("steps", "(train|client)_.*"),
        (
            "diagnosis",
            "train_(verdict|step_part|step_hidden|lost|straggler_excess|own_work|peer_wait|cause|stalled)_?.*",
        ),
    ],
)
def test_only_collector_exports_only_its_series(collector: str, pattern: str) -> None:
    names = exported(collector) - {"label_overflow_total"}
    assert names
    assert [name for name in names if not re.fullmatch(pattern, name)] == []


def test_state_of_collectors_is_part_of_self() -> None:
    assert "collector_success" not in exported("memory")
    assert "collector_success" in exported("memory", "self")


def test_sources_of_a_collector_that_is_off_are_not_added() -> None:
    kept = Store()
    settings = ServeSettings("", Path(), collectors=("self",))
    exports = Exports(settings, kept, samplers_of(("self",), kept), Observed())
    exports.add("captures", lambda: pytest.fail("a source that is off was read"))
    assert samples(exports.page()) == {("torchperfd_label_overflow_total", frozenset()): 0.0}


# The level


def read_by_rules() -> Iterator[tuple[str, set[str]]]:
    """Yield what each rule reads: a metric, and the labels it is selected by."""
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield from selectors(re.sub(r"\w+:torchperfd_\w+:\w+", "", rule["expr"]))


def essential(tmp_path: Path) -> dict[str, set[str]]:
    """Return the names and labels of all that is exported at the level essential."""
    text = page_of(tmp_path / "daemon", essential_only=True).render("")[0].decode()
    return {name: labels for name, (_, labels) in emitted(text, tmp_path, essential_only=True).items()}


def test_essential_page_has_all_that_rules_read(tmp_path: Path) -> None:
    found = essential(tmp_path)
    read = list(read_by_rules())
    assert len({name for name, _ in read}) > 30
    assert [(name, labels) for name, labels in read if not labels - OF_SCRAPE <= found.get(name, set())] == []
    assert {name for name, _ in read} <= found.keys()


def test_essential_page_has_no_more_of_ranks(tmp_path: Path) -> None:
    of_ranks = {name for name, labels in essential(tmp_path).items() if {"run", "rank"} <= labels}
    assert of_ranks - {name for name, _ in read_by_rules()} == {
        "torchperfd_train_samples_total",
        "torchperfd_train_tokens_total",
        "torchperfd_train_own_work_seconds",
        "torchperfd_train_peer_wait_seconds",
        "torchperfd_train_own_work_error_seconds",
    }


def test_essential_page_keeps_values_and_everything_beside_ranks(tmp_path: Path) -> None:
    full, kept = samples(page_of(tmp_path / "a")), samples(page_of(tmp_path / "b", essential_only=True))
    assert {key: full[key] for key in kept} == kept
    left_out = {key for key in full if key not in kept}
    assert all({"run", "rank"} <= {label for label, _ in labels} for _, labels in left_out)
    states = {key for key in full if key[0] == "torchperfd_train_state"}
    assert states & kept.keys() == {key for key in states if full[key] == 1}


def test_rank_has_at_most_half_of_its_series(tmp_path: Path) -> None:
    rank = {("run", "bert-17"), ("rank", "0")}
    sizes = [
        sum(rank <= labels for _, labels in samples(page_of(tmp_path / str(only), essential_only=only)))
        for only in (True, False)
    ]
    assert 2 * sizes[0] <= sizes[1]


def test_level_of_the_settings_is_that_of_the_page() -> None:
    assert "train_cuda_peak_bytes" in exported("steps")
    assert "train_cuda_peak_bytes" not in exported("steps", level=ESSENTIAL)
    assert "train_rank_info" in exported("steps", level=ESSENTIAL)


def test_triggers_read_what_the_page_leaves_out() -> None:
    kept = store()
    settings = ServeSettings("", Path(), collectors=("self",), metrics_level=ESSENTIAL)
    exports = Exports(settings, kept, samplers_of((), kept), Observed())
    assert "torchperfd_train_cuda_peak_bytes" in {name for name, _ in samples(exports.of_triggers())}


def test_docs_mark_what_essential_leaves_out() -> None:
    marked = {
        f"torchperfd_{name}"
        for cell in re.findall(r"^\| (`.*?) \(full\) \|", DOC, re.MULTILINE)
        for name in re.findall(r"`(\w+)", cell)
    }
    of_ranks = {name for name, labels in METRICS.items() if {"run", "rank"} <= labels}
    kept = {name for name in of_ranks if _family(name) in ESSENTIAL_FAMILIES}
    assert len(kept) == len(ESSENTIAL_FAMILIES)
    assert marked == of_ranks - kept


def test_docs_have_the_series_of_each_collector() -> None:
    section = DOC.partition("\n## Collectors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+` ?)+) \|", section, re.MULTILINE)
    assert tuple(name for row in rows for name in re.findall(r"\w+", row)) == COLLECTORS


def _family(name: str) -> str:
    return name.removeprefix("torchperfd_").removesuffix("_total")


# Versions


@pytest.mark.parametrize(
    ("version", "other", "neighbours"),
    [
        ("0.2.0", "0.2.7", True),
        ("0.2.0", "0.3.0.dev5+g1234567", True),
        ("0.2.0", "0.4.0", False),
        ("0.9.1", "1.0.0", True),
        ("0.9.1", "1.1.0", False),
        ("2.0.0", "1.40.0", True),
        ("2.0.0", "0.9.0", False),
        ("", "0.4.0", True),
        ("unknown", "0.4.0", True),
    ],
)
def test_neighbours_are_releases_that_succeed_each_other(version: str, other: str, neighbours: bool) -> None:
    assert are_neighbours(version, other) is neighbours
    assert are_neighbours(other, version) is neighbours


def test_unsupported_clients_are_counted_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchperfd_daemon.metrics.training.__version__", "0.4.0")
    kept = Store()
    for rank, version in enumerate(("0.4.1", "0.2.0", "0.1.9", "")):
        kept.join(RankIdentity("old", rank)).client_version = version
    kept.join(RankIdentity("new", 0)).client_version = "0.5.0"
    found = samples(MetricsPage([TrainingMetrics(kept).families]))
    counts = {dict(labels)["run"]: value for (name, labels), value in found.items() if "clients" in name}
    assert counts == {"old": 2, "new": 0}
