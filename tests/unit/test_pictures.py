"""The pictures of the documentation: a command draws each, a page shows each, and words describe it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import ROOT

pytest.importorskip("pyte", reason="pyte is not installed: pip install --group pictures")
pytest.importorskip("PIL", reason="Pillow is not installed: pip install --group pictures")

from PIL import Image
from tools.pictures import IMAGES, LARGEST_BYTES, PICTURES, reduce_colours
from tools.terminal_picture import page_of, screen_after

PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(page for folder in ("docs", "deploy", "grafana") for page in sorted((ROOT / folder).rglob("*.md"))),
]
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def shown(page: Path) -> Iterator[tuple[str, Path]]:
    """Yield the words and the file of each picture on a page."""
    for words, target in _PICTURE.findall(page.read_text(encoding="utf-8")):
        yield words, (page.parent / target).resolve()


def test_pictures_each_have_a_command_that_draws_them() -> None:
    assert {path.name for path in IMAGES.iterdir()} == set(PICTURES)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(PICTURES.values()) <= set(targets)


def test_pictures_are_small() -> None:
    assert [path.name for path in IMAGES.iterdir() if path.stat().st_size > LARGEST_BYTES] == []


def test_pictures_are_on_a_page_with_words_for_them() -> None:
    found = [(page, *each) for page in PAGES for each in shown(page)]
    assert [(page.name, file.name) for page, words, file in found if len(words.split()) < 4] == []
    assert {file for _, _, file in found} == set(IMAGES.iterdir())


def test_readme_shows_the_terminal_the_page_and_a_dashboard() -> None:
    kinds = [file.name.partition("-")[0] for _, file in shown(ROOT / "README.md")]
    assert kinds == ["terminal", "page", "dashboard"]


def test_reduced_picture_keeps_background_and_rare_colours() -> None:
    picture = Image.new("RGB", (64, 64), (17, 21, 26))
    for at in range(1024):
        picture.putpixel((at % 64, at // 64), (at // 4, at // 5, 100))
    picture.putpixel((63, 63), (255, 0, 0))
    reduced = reduce_colours(picture).convert("RGB")
    assert len(reduced.getcolors(256) or []) == 256
    assert reduced.getpixel((0, 63)) == (17, 21, 26)
    assert reduced.getpixel((63, 63)) == (255, 0, 0)


def test_terminal_picture_keeps_styles_and_boxes() -> None:
    styles = "\x1b[1;31m✗\x1b[0m │ \x1b[2mdim\x1b[0m"
    colours = "\x1b[38;5;2mg\x1b[0m\x1b[38;2;1;2;3mr\x1b[0m\x1b[7mk\x1b[0m"
    page = page_of(screen_after(f"{styles}\r\n{colours}", 10, 4), "top")
    assert '<i style="color: #ff7b72; font-weight: bold">✗</i>' in page
    assert "<i>│</i>" in page
    assert page.count("opacity: .7") == 3
    assert '<i style="color: #010203">r</i>' in page
    assert '<i style="color: #11151a; background: #d7dde5">k</i>' in page
    assert page.count("<div>") == 2


def test_terminal_picture_shows_markup_as_text() -> None:
    page = page_of(screen_after("<b>&", 10, 2), "<script>")
    assert "<i>&lt;</i><i>b</i><i>&gt;</i><i>&amp;</i>" in page
    assert "<header>&lt;script&gt;</header>" in page


def test_terminal_picture_scrolls_to_the_end_of_long_output() -> None:
    output = "".join(f"{line}\r\n" for line in range(30))
    page = page_of(screen_after(output, 4, 5), "run")
    assert page.count("<div>") == 4
    assert "<i>2</i><i>6</i>" in page
    assert "<i>2</i><i>5</i>" not in page
