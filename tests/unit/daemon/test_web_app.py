"""The HTTP application: probes, metrics, compression, and long work in slices."""

import asyncio
import base64
import gzip
from pathlib import Path

import httpx
import pytest

from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.web.app import PageCache, build_app
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.runs_api import in_slices


class Http:
    """A client of the daemon's pages, with a daemon that is ready or not as a test says."""

    def __init__(self, web_config: WebConfigFile | None = None) -> None:
        self.ready = False
        store = Store()
        store.join(RankIdentity("bert-17", 0))
        page = MetricsPage([TrainingMetrics(store).families])
        self._transport = httpx.ASGITransport(build_app(page, lambda: self.ready, web_config))

    def get(
        self, path: str, method: str = "GET", accept: str = "*/*", content: bytes = b"", **headers: str
    ) -> httpx.Response:
        sent = {"accept": accept, **{name.replace("_", "-"): value for name, value in headers.items()}}

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers=sent, content=content)

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


@pytest.mark.parametrize(
    "path", ["/assets", "/metrics2", "/metrics/x", "/-/", "/-/reload", "/docs", "/%2e%2e/x"]
)
def test_there_is_nothing_else(http: Http, path: str) -> None:
    assert http.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/metrics", "/-/healthy", "/-/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_only_reads(http: Http, path: str, method: str) -> None:
    assert http.get(path, method).status_code == 405


@pytest.mark.parametrize(
    ("encodings", "zipped"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("identity", False),
        ("", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("xgzip", False),
    ],
)
def test_pages_are_compressed_for_clients_that_accept_it(http: Http, encodings: str, zipped: bool) -> None:
    answer = http.get("/metrics", accept_encoding=encodings)
    assert (answer.headers.get("content-encoding") == "gzip") == zipped
    assert answer.headers["vary"] == "accept, accept-encoding"
    assert 'torchperfd_train_world_size{rank="0",run="bert-17"} 1.0' in answer.text


@pytest.mark.parametrize("accept", ["application/openmetrics-text;q=0", "*/*;" + "q=0.1," * 500, ";;,=,"])
def test_odd_wishes_get_the_plain_page(http: Http, accept: str) -> None:
    assert http.get("/metrics", accept=accept).headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/metrics", "/-/ready", "/none"])
def test_a_request_with_a_body_is_not_read(http: Http, path: str) -> None:
    answer = http.get(path, "POST", content=b"x")
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert http.get(path, transfer_encoding="chunked").status_code == 413


class Page:
    """A page that takes so long, by the clock of the test, and counts how often it is rendered."""

    def __init__(self, now: list[float], seconds: float) -> None:
        self.rendered: list[str] = []
        self._now, self._seconds = now, seconds

    def render(self, accept: str) -> tuple[bytes, str]:
        self._now[0] += self._seconds
        self.rendered.append(accept.partition(";")[0])
        return f"page {len(self.rendered)}".encode(), accept


def test_rendering_never_takes_more_than_a_tenth_of_the_time() -> None:
    now = [0.0]
    page = Page(now, 0.5)
    cache = PageCache(page, lambda: now[0])  # type: ignore[arg-type]
    while now[0] < 100:
        cache.get(openmetrics=False, zipped=False)
        now[0] += 0.01
    assert 18 <= len(page.rendered) <= 20


def test_each_format_is_rendered_once_and_zipped_from_that() -> None:
    now = [0.0]
    page = Page(now, 0.5)
    cache = PageCache(page, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        for openmetrics, body in ((False, b"page 1"), (True, b"page 2")):
            plain = cache.get(openmetrics, zipped=False)
            zipped = cache.get(openmetrics, zipped=True)
            assert (plain.body, gzip.decompress(zipped.body)) == (body, body)
            assert plain.content_type == zipped.content_type
    assert page.rendered == ["text/plain", "application/openmetrics-text"]
    now[0] += 100
    assert gzip.decompress(cache.get(openmetrics=False, zipped=True).body) == b"page 3"


def test_headers_of_the_web_configuration_are_on_every_answer(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("http_server_config: {headers: {X-Frame-Options: deny}}")
    http = Http(WebConfigFile(path))
    for page in ("/metrics", "/-/ready", "/none"):
        assert http.get(page).headers["x-frame-options"] == "deny"


def test_only_users_may_read_anything_but_the_probes(tmp_path: Path) -> None:
    bcrypt = pytest.importorskip("bcrypt")
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: {{ada: {bcrypt.hashpw(b'right', bcrypt.gensalt(4)).decode()}}}")
    http = Http(WebConfigFile(path))
    http.ready = True
    right, wrong = ("Basic " + base64.b64encode(text).decode() for text in (b"ada:right", b"ada:wrong"))
    for page in ("/-/healthy", "/-/ready"):
        assert http.get(page).status_code == http.get(page, authorization=wrong).status_code == 200
    for page in ("/metrics", "/none", "/-/healthy/", "/-/Ready", "//-/ready"):
        for answer in (http.get(page), http.get(page, authorization=wrong)):
            assert (answer.status_code, answer.headers["www-authenticate"]) == (
                401,
                'Basic realm="torchperfd"',
            )
    assert http.get("/metrics", authorization=right).status_code == 200
    assert http.get("/none", authorization=right).status_code == 404


@pytest.mark.parametrize(("seconds", "order"), [(0.003, "0 1 other 2 3"), (0.0, "0 1 2 3 other")])
async def test_in_slices_long_work_lets_others_run_between(seconds: float, order: str) -> None:
    now = [0.0]
    done: list[str] = []

    async def work() -> None:
        async for number in in_slices(range(4), 0.005, lambda: now[0]):
            done.append(str(number))
            now[0] += seconds

    async def other() -> None:
        done.append("other")

    await asyncio.gather(work(), other())
    assert " ".join(done) == order
