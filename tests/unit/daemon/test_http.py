"""The HTTP side: three pages, and nothing else."""

import asyncio

import httpx
import pytest

from torchperfd_daemon.http import build_app
from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.store import RankIdentity, Store


class Http:
    """A client of the daemon's pages, with a daemon that is ready or not as a test says."""

    def __init__(self) -> None:
        self.ready = False
        store = Store()
        store.join(RankIdentity("bert-17", 0))
        page = MetricsPage([TrainingMetrics(store)])
        self._transport = httpx.ASGITransport(build_app(page, lambda: self.ready))

    def get(self, path: str, method: str = "GET", accept: str = "*/*") -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://daemon") as client:
                return await client.request(method, path, headers={"accept": accept})

        return asyncio.run(ask())


@pytest.fixture
def http() -> Http:
    return Http()


def test_it_is_healthy_always_and_ready_when_it_serves(http: Http) -> None:
    for ready, code, said in ((False, 503, "is not ready"), (True, 200, "is ready"), (False, 503, "is not")):
        http.ready = ready
        answer = http.get("/-/ready")
        assert answer.status_code == code
        assert said in answer.text
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        healthy = http.get("/-/healthy")
        assert (healthy.status_code, healthy.text) == (200, "torchperfd is healthy\n")


# What a Prometheus 2.42 asks with.
OPENMETRICS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("*/*", "text/plain; version="),
        ("text/plain", "text/plain; version="),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_metrics_come_in_the_format_that_was_asked_for(http: Http, accept: str, content_type: str) -> None:
    answer = http.get("/metrics", accept=accept)
    assert answer.status_code == 200
    # The library may add what it does with names that are not ASCII; ours all are.
    assert answer.headers["content-type"].startswith(content_type)
    assert "charset=utf-8" in answer.headers["content-type"]
    assert 'torchperfd_train_world_size{rank="0",run="bert-17"} 1.0' in answer.text
    assert answer.text.endswith("# EOF\n") == (accept == OPENMETRICS)


@pytest.mark.parametrize("path", ["/", "/metrics2", "/metrics/x", "/-/", "/-/reload", "/docs", "/%2e%2e/x"])
def test_there_is_nothing_else(http: Http, path: str) -> None:
    assert http.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/metrics", "/-/healthy", "/-/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_only_reads(http: Http, path: str, method: str) -> None:
    assert http.get(path, method).status_code == 405
