"""A real Prometheus scrapes a real daemon fed by a real training process, and hands on what it has.

VictoriaMetrics, where it is installed, keeps what Prometheus writes to it, configured as docs/fleet.md says.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.promql import Query, queries
from tests.support.node import EXAMPLE, ROOT, Node, eventually, free_port
from tests.support.prometheus import Queried, start_prometheus

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus")]
LONG_TERM = "victoria-metrics"


def fenced(text: str, first: str) -> str:
    """Return the block of a page's code that begins with this line."""
    start = text.index(f"```yaml\n{first}") + len("```yaml\n")
    return text[start : text.index("```", start)]


DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))


REMOTE_WRITE = fenced((ROOT / "docs" / "fleet.md").read_text(), "remote_write:")


def long_term_store(directory: Path) -> Queried | None:
    """Start VictoriaMetrics; return None where it is not installed."""
    if shutil.which(LONG_TERM) is None:
        return None
    port = free_port()
    return Queried(
        directory / "victoria.log",
        port,
        LONG_TERM,
        f"-httpListenAddr=127.0.0.1:{port}",
        f"-storageDataPath={directory / 'victoria'}",
        # So that what was written a moment ago is found, too.
        "-search.latencyOffset=0s",
    )


Watched = tuple[Node, Queried, Queried | None]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A daemon, a Prometheus and a store that have watched training for a while, still running."""
    node = Node()
    node.start_daemon()
    directory = tmp_path_factory.mktemp("prometheus")
    store = long_term_store(directory)
    written = REMOTE_WRITE.replace("victoria:8428", f"127.0.0.1:{store.port}") if store is not None else ""
    prometheus = start_prometheus(directory, {"torchperfd": node.metrics_port}, remote_write=written)
    try:
        with node.train("--epochs", "5000", script=EXAMPLE, TORCHPERFD_RUN="digits") as process:
            # Eleven seconds of steps, of scrapes that did not fail. Neither the daemon's being up nor
            # the run's own series will do: both are there before torch is imported.
            phases = 'count_over_time(torchperfd_train_phase_seconds_total{run="digits"}[1m])'
            eventually(lambda: (prometheus.value(f"min({phases})") or 0) >= 22, 90, node.log)
            eventually(lambda: prometheus.query("rate(torchperfd_train_steps_total[1m]) > 0"), 60, node.log)
            node.command("capture", "--steps", "2")
            yield node, prometheus, store
            process.kill()
            process.communicate()
    finally:
        prometheus.stop()
        if store is not None:
            store.stop()
        node.close()


@pytest.fixture
def trained(watched: Watched) -> tuple[Node, Queried]:
    """The daemon and the Prometheus."""
    return watched[0], watched[1]


@pytest.fixture
def kept(watched: Watched) -> tuple[Queried, Queried]:
    """The Prometheus, and the store that it writes to."""
    store = watched[2]
    assert store is not None
    return watched[1], store


def test_the_daemon_is_up(trained: tuple[Node, Queried]) -> None:
    assert trained[1].value('up{job="torchperfd"}') == 1


def test_steps_and_their_time_increase_together(trained: tuple[Node, Queried]) -> None:
    steps = 'torchperfd_train_steps_total{run="digits"}'
    seconds = 'torchperfd_train_step_seconds_total{run="digits"}'
    for counter in (steps, seconds):
        assert (trained[1].value(f"rate({counter}[1m])") or 0) > 0
        assert trained[1].value(f"resets({counter}[1m])") == 0
    # Both change at the same scrapes; idelta() is the difference of the newest two.
    apart = (
        f"count_over_time(((idelta({steps}[2s]) > bool 0) != (idelta({seconds}[2s]) > bool 0))[20s:500ms])"
    )
    assert trained[1].value(apart) is None


def test_phases_sum_to_the_steps_at_every_scrape(trained: tuple[Node, Queried]) -> None:
    shares = (
        'sum(torchperfd_train_phase_seconds_total{run="digits",phase!="validate"})'
        ' / sum(torchperfd_train_step_seconds_total{run="digits"})'
    )
    assert trained[1].value(f"count_over_time(({shares})[1m:500ms])") >= 20  # type: ignore[operator]
    assert trained[1].value(f"min_over_time(({shares})[1m:500ms])") == pytest.approx(1, abs=1e-6)
    assert trained[1].value(f"max_over_time(({shares})[1m:500ms])") == pytest.approx(1, abs=1e-6)


def test_phase_shares_sum_to_one(trained: tuple[Node, Queried]) -> None:
    # Of the newest seconds: where a range reaches back beyond the run's first scrape, rate() guesses how
    # much of it there was, for each series by its own first value.
    shares = trained[1].query(
        'sum by (phase) (rate(torchperfd_train_phase_seconds_total{run="digits",phase!="validate"}[5s]))'
        ' / ignoring(phase) group_left sum(rate(torchperfd_train_step_seconds_total{run="digits"}[5s]))'
    )
    by_phase = {share["metric"]["phase"]: float(share["value"][1]) for share in shares}
    assert {"data", "forward", "loss", "backward", "optimizer", "zero_grad", "other"} == set(by_phase)
    assert sum(by_phase.values()) == pytest.approx(1, abs=0.02)
    assert all(share > 0 for share in by_phase.values())


def test_ranks_join_with_what_is_known_of_them(trained: tuple[Node, Queried]) -> None:
    (joined,) = trained[1].query(
        "rate(torchperfd_train_steps_total[1m])"
        " * on (run, rank) group_left (job_name, torch_version) torchperfd_train_rank_info"
    )
    assert joined["metric"]["job_name"] == "train_digits"
    assert joined["metric"]["torch_version"].startswith("2.")


def test_a_quantile_of_step_durations(trained: tuple[Node, Queried]) -> None:
    quantile = trained[1].value(
        "histogram_quantile(0.5, sum by (le) (rate(torchperfd_train_step_duration_seconds_bucket[1m])))"
    )
    assert quantile is not None
    assert 0 < quantile < 1


def asked_of(path: Path, node: Node) -> list[Query]:
    """Return the queries of a dashboard about the run, its one rank, and the node."""
    document = json.loads(path.read_text())
    return queries(document, run="digits", rank="0", instance=f"127.0.0.1:{node.metrics_port}")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_the_dashboards_answers(trained: tuple[Node, Queried], path: Path) -> None:
    asked = asked_of(path, trained[0])
    assert len(asked) > 10

    def unanswered() -> list[str]:
        return [query.name for query in asked if not trained[1].query(query.expr) and not query.may_be_empty]

    eventually(lambda: not unanswered(), 60, lambda: str(unanswered()))


@pytest.mark.needs("victoria-metrics")
def test_what_is_handed_on_is_what_prometheus_has(kept: tuple[Queried, Queried]) -> None:
    prometheus, store = kept
    at = time.time() - 1
    name = 'torchperfd_train_steps_total{run="digits"}'
    # It is written in batches, a few seconds apart.
    eventually(lambda: store.query(f"timestamp({name}) >= {at}"), 60, str)
    for expression in (name, 'up{job="torchperfd"}', "torchperfd_train_rank_info", f"rate({name}[10s]) > 0"):
        ours, theirs = prometheus.query(expression, at), store.query(expression, at)
        assert ours, expression
        assert {**ours[0]["metric"], "cluster": "one"} == theirs[0]["metric"]
    (steps,), (kept_steps,) = prometheus.query(name, at), store.query(name, at)
    assert steps["value"][1] == kept_steps["value"][1]


@pytest.mark.needs("victoria-metrics")
def test_only_what_is_ours_is_handed_on(kept: tuple[Queried, Queried]) -> None:
    prometheus, store = kept
    assert prometheus.query("scrape_samples_scraped")
    eventually(lambda: store.query("torchperfd_train_steps_total"), 60, str)
    assert store.query("scrape_samples_scraped") == []


@pytest.mark.needs("victoria-metrics")
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_the_dashboards_answers_from_the_store(
    trained: tuple[Node, Queried], kept: tuple[Queried, Queried], path: Path
) -> None:
    store = kept[1]
    eventually(lambda: store.query("rate(torchperfd_train_steps_total[1m]) > 0"), 60, str)
    # It has only what is ours (below), so not what Prometheus itself knows about a scrape.
    asked = [
        query
        for query in asked_of(path, trained[0])
        if not query.may_be_empty and "torchperfd_" in query.expr
    ]

    def unanswered() -> list[str]:
        return [query.name for query in asked if not store.query(query.expr)]

    # A range wants two samples of each series, and they come one scrape after another.
    eventually(lambda: not unanswered(), 60, lambda: str(unanswered()))
