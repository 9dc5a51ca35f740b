"""Labels on the pages of `--html` can be read in both themes: WCAG 2 level AA asks for 4.5 to 1."""

import colorsys
import re
from importlib.resources import files

import pytest

ASSETS = files("torchperfd_daemon.pages")
CSS = (ASSETS / "page.css").read_text(encoding="utf-8")
HUES = [
    int(hue)
    for hue in re.search(r"HUES = \[([\d, ]+)\]", (ASSETS / "capture.js").read_text("utf-8"))[1].split(",")  # type: ignore[index]
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
        ("--ink", "--mark"),
        ("--ink", "--card"),
        ("--soft", "--card"),
        ("--ink", "--page"),
        ("--soft", "--page"),
        ("--worse", "--card"),
        ("--better", "--card"),
        ("--worse", "--hover"),
        ("--better", "--hover"),
    ],
)
def test_text_has_enough_contrast(text: str, ground: str, name: str) -> None:
    colours = theme(name)
    assert contrast(of_hex(colours[text]), of_hex(colours[ground])) >= LEAST
