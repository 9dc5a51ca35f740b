"""A real Prometheus scrapes a real daemon fed by a real training process."""

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from tests.node import EXAMPLE, ROOT, Node, eventually, free_port
from tests.promql import queries

pytestmark = pytest.mark.needs("prometheus")
DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))


class Prometheus:
    """A Prometheus server that scrapes one daemon twice a second."""

    def __init__(self, directory: Path, target_port: int) -> None:
        self.port = free_port()
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"
            "scrape_configs:\n"
            "  - job_name: torchperfd\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]\n"
        )
        with (directory / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query.

        Raises:
            AssertionError: Prometheus rejects it; the message is Prometheus's own.
        """
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                document = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                    return []  # still starting
                raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:
            return []
        assert document["status"] == "success"
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the one value of an instant query, None when there is none."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Prometheus]]:
    """A daemon and a Prometheus that have watched a training process for a while, still running."""
    node = Node()
    node.start_daemon()
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), node.metrics_port)
    command = (sys.executable, "-m", "torchperfd", "run", "--quiet", "--run", "digits", str(EXAMPLE))
    try:
        with node.running(*command, "--epochs", "5000") as process:
            # Ten seconds: of what it has not scraped of a minute, rate() leaves out the same part everywhere.
            eventually(lambda: (prometheus.value("count_over_time(up[1m])") or 0) >= 20, 90, node.log)
            eventually(lambda: prometheus.query("rate(torchperfd_train_steps_total[1m]) > 0"), 60, node.log)
            node.command("capture", "--steps", "2")
            yield node, prometheus
            process.kill()
            process.communicate()
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(15)
        node.close()


def test_the_daemon_is_up(trained: tuple[Node, Prometheus]) -> None:
    assert trained[1].value('up{job="torchperfd"}') == 1


def test_steps_and_their_time_have_rates_that_agree(trained: tuple[Node, Prometheus]) -> None:
    prometheus = trained[1]
    steps = prometheus.value('rate(torchperfd_train_steps_total{run="digits",rank="0"}[1m])')
    seconds = prometheus.value('rate(torchperfd_train_step_seconds_total{run="digits",rank="0"}[1m])')
    overall = prometheus.value(
        'torchperfd_train_step_seconds_total{run="digits"} / torchperfd_train_steps_total{run="digits"}'
    )
    assert steps is not None
    assert seconds is not None
    assert overall is not None
    assert steps > 0
    # One process cannot spend more than a second per second in steps.
    assert 0 < seconds <= 1.05
    assert seconds / steps == pytest.approx(overall, rel=0.5)


def test_phase_shares_sum_to_one(trained: tuple[Node, Prometheus]) -> None:
    shares = trained[1].query(
        'sum by (phase) (rate(torchperfd_train_phase_seconds_total{run="digits",phase!="validate"}[1m]))'
        ' / ignoring(phase) group_left sum(rate(torchperfd_train_step_seconds_total{run="digits"}[1m]))'
    )
    by_phase = {share["metric"]["phase"]: float(share["value"][1]) for share in shares}
    assert {"data", "forward", "loss", "backward", "optimizer", "zero_grad", "other"} == set(by_phase)
    assert sum(by_phase.values()) == pytest.approx(1, abs=0.02)
    assert all(share > 0 for share in by_phase.values())


def test_ranks_join_with_what_is_known_of_them(trained: tuple[Node, Prometheus]) -> None:
    (joined,) = trained[1].query(
        "rate(torchperfd_train_steps_total[1m])"
        " * on (run, rank) group_left (job_name, torch_version) torchperfd_train_rank_info"
    )
    assert joined["metric"]["job_name"] == "train_digits"
    assert joined["metric"]["torch_version"].startswith("2.")


def test_a_quantile_of_step_durations(trained: tuple[Node, Prometheus]) -> None:
    quantile = trained[1].value(
        "histogram_quantile(0.5, sum by (le) (rate(torchperfd_train_step_duration_seconds_bucket[1m])))"
    )
    assert quantile is not None
    assert 0 < quantile < 1


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_the_dashboards_answers(trained: tuple[Node, Prometheus], path: Path) -> None:
    asked = list(queries(json.loads(path.read_text()), run="digits"))
    assert len(asked) > 10
    empty = [query.name for query in asked if not trained[1].query(query.expr) and not query.may_be_empty]
    assert empty == []
