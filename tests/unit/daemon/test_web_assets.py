"""Files of the live page: served safely, with enough contrast."""

import asyncio
import colorsys
import re
import socket
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp

from torchperfd_daemon.metrics.page import MetricsPage
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


PAGE_ASSETS = files("torchperfd_daemon.pages")
CSS = (ASSETS / "kit.css").read_text("utf-8") + (PAGE_ASSETS / "page.css").read_text("utf-8")
HUES = [
    int(hue)
    for hues in re.findall(r"HUES = \[([\d, ]+)\]", (PAGE_ASSETS / "names.js").read_text("utf-8"))
    for hue in hues.split(",")
]
LEAST = 4.5

Colour = tuple[float, float, float]


def theme(name: str) -> dict[str, str]:
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)[:2]
    values = dict(re.findall(r"(--[\w-]+): ([^;]+);", light))
    return values | dict(re.findall(r"(--[\w-]+): ([^;]+);", dark)) if name == "dark" else values


def of_hex(text: str) -> Colour:
    return tuple(int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))  # type: ignore[return-value]


def of_hue(hue: int, colours: dict[str, str]) -> Colour:
    share = {name: float(colours[f"--hues-{name}"].rstrip("%")) / 100 for name in ("lightness", "saturation")}
    return colorsys.hls_to_rgb(hue / 360, share["lightness"], share["saturation"])


def mixed(over: Colour, below: Colour, opacity: float) -> Colour:
    return tuple(opacity * one + (1 - opacity) * other for one, other in zip(over, below, strict=True))  # type: ignore[return-value]


def luminance(colour: Colour) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_on_white_is_21() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("hue", HUES)
def test_flame_labels_have_enough_contrast(hue: int, name: str) -> None:
    colours = theme(name)
    label, box = of_hex(colours["--on-hue"]), of_hue(hue, colours)
    assert contrast(label, box) >= LEAST
    # What is above the one zoomed to is paler: both its label and its box.
    opacity = float(re.search(r"\.flame button\.above \{\s*opacity: (\d+)%", CSS)[1]) / 100  # type: ignore[index]
    card = of_hex(colours["--card"])
    assert contrast(mixed(label, card, opacity), mixed(box, card, opacity)) >= LEAST


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        ("--ink", "--found"),
        ("--ink", "--card"),
        ("--soft", "--card"),
        ("--ink", "--page"),
        ("--soft", "--page"),
        ("--bad", "--card"),
        ("--good", "--card"),
        ("--bad", "--hover"),
        ("--good", "--hover"),
        ("--ink", "--hatch"),
        ("--link", "--page"),
        ("--good", "--good-back"),
        ("--bad", "--bad-back"),
        ("--warn", "--warn-back"),
        ("--soft", "--quiet-back"),
    ],
)
def test_text_has_enough_contrast(text: str, ground: str, name: str) -> None:
    colours = theme(name)
    assert contrast(of_hex(colours[text]), of_hex(colours[ground])) >= LEAST


PHASE_COLOURS = sorted({name for name in theme("light") if re.fullmatch(r"--phase-(?!own)\w+", name)})


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("phase", PHASE_COLOURS)
def test_names_on_phases_have_enough_contrast(phase: str, name: str) -> None:
    box = of_hex(theme(name)[phase])
    words = (0.0, 0.0, 0.0) if luminance(box) > 0.179 else (1.0, 1.0, 1.0)
    assert contrast(words, box) >= LEAST
