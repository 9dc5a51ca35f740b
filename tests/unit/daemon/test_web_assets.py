"""The live page's files, the headers of all answers, and requests of foreign sites."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp

from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.web.app import ASSETS, Assets, build_app
from torchperfd_daemon.web.guard import CONTENT_POLICY, Sites, host_name

APP = build_app(MetricsPage([]), lambda: True, sites=Sites(["gpu.example"]))


def ask(
    path: str, method: str = "GET", content: bytes = b"", app: object = APP, **headers: str
) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9407") as client:
            return await client.request(method, path, headers=sent, content=content)

    return asyncio.run(send())


@pytest.mark.parametrize(
    "path", ["/", "/runs/a%2Fb", "/captures", "/captures/20260101-000000-abcdef", "/node"]
)
def test_every_view_is_the_one_page(path: str) -> None:
    answer = ask(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<!doctype html>" in answer.text.lower()


def test_page_has_no_inline_script_or_style() -> None:
    text = (ASSETS / "index.html").read_text()
    assert "<style" not in text
    assert "style=" not in text
    assert text.count("<script") == text.count("<script src=") + text.count('<script type="module" src=')
    assert " on" not in {part[:3] for part in text.split("<")}


def serving(directory: Path) -> ASGIApp:
    route = Route("/assets/{name:path}", Assets(directory).file)
    return build_app(MetricsPage([]), lambda: True, routes=[route])


def test_assets_are_served_with_an_etag_until_they_change(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "plot.js").write_text("plot(1)" * 100)
    assert Assets(tmp_path).names == ["index.html", "lib/plot.js"]
    app = serving(tmp_path)
    first = ask("/assets/lib/plot.js", app=app, accept_encoding="identity")
    assert (first.status_code, first.text) == (200, "plot(1)" * 100)
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    again = ask("/assets/lib/plot.js", app=app, if_none_match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    zipped = ask("/assets/lib/plot.js", app=app, accept_encoding="gzip")
    assert zipped.headers["content-encoding"] == "gzip"
    assert zipped.text == first.text
    (tmp_path / "lib" / "plot.js").write_text("plot(2)")
    assert ask("/assets/lib/plot.js", app=serving(tmp_path)).headers["etag"] != first.headers["etag"]


def test_only_listed_files_are_served(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "secret.py").write_text("secret")
    (tmp_path / "link.js").symlink_to(Path(__file__))
    files = Assets(tmp_path)
    assert files.names == ["index.html"]


@pytest.mark.parametrize(
    "path",
    [
        "/assets/",
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets//etc/passwd",
        "/assets/%00",
        "/assets/index.html/",
        "/assets/INDEX.HTML",
    ],
)
def test_paths_out_of_the_assets_are_not_there(path: str) -> None:
    answer = ask(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/ready", "/none", "/api/v1/none", "/assets/index.html"])
def test_security_headers_are_on_every_answer(path: str) -> None:
    headers = ask(path).headers
    assert headers["content-security-policy"] == CONTENT_POLICY
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] in ("no-store", "no-cache")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:9407", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("127.8.8.8:80", 200),
        ("[::1]:9407", 200),
        ("gpu.example:9407", 200),
        ("gpu.example.", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("10.1.2.3", 421),
        ("", 421),
        ("[::2]", 421),
    ],
)
def test_foreign_hosts_are_refused(host: str, code: int) -> None:
    for path in ("/", "/assets/index.html"):
        assert ask(path, host=host).status_code == code
    assert ask("/api/v1/none", host=host).status_code == (404 if code == 200 else 421)
    assert ask("/metrics", host=host).status_code == code


def test_listening_address_is_a_known_host() -> None:
    scope = {"type": "http", "server": ("10.1.2.3", 9407), "headers": Headers({"host": "10.1.2.3:9407"}).raw}
    assert Sites().knows_host(scope)
    assert not Sites().knows_host({**scope, "server": ("10.1.2.4", 9407)})


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 404),
        ({"origin": "http://127.0.0.1:9407"}, 404),
        ({"sec-fetch-site": "same-origin"}, 404),
        ({"sec-fetch-site": "none"}, 404),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_foreign_sites_are_refused(headers: dict[str, str], code: int) -> None:
    for method in ("GET", "POST"):
        assert ask("/api/v1/none", method, b"", APP, **headers).status_code == code


def test_another_port_of_this_host_may_not_act() -> None:
    assert ask("/api/v1/none", "POST", sec_fetch_site="same-site").status_code == 403


@pytest.mark.parametrize(
    ("path", "method", "content", "code"),
    [
        ("/api/v1/none", "POST", b"{}", 404),
        ("/api/v1/none", "POST", b" " * 16384, 404),
        ("/api/v1/none", "POST", b" " * 16385, 413),
        ("/api/v1/none", "PUT", b"{}", 413),
        ("/api/v1/none", "GET", b"{}", 413),
        ("/", "POST", b"{}", 413),
    ],
)
def test_bodies_are_small_and_of_posts_only(path: str, method: str, content: bytes, code: int) -> None:
    assert ask(path, method, content).status_code == code


def test_host_names_are_read_without_ports() -> None:
    hosts = ("A:1", "[::1]:9", "[::1", "a.b.", "")
    assert [host_name(host) for host in hosts] == ["a", "::1", "::1", "a.b", ""]
