"""The pictures in docs/images: which command draws each, and how they are saved."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ROOT / "docs" / "images"

PICTURES: Final[Mapping[str, str]] = {
    "dashboard-fleet.png": "dashboard-pictures",
    "dashboard-run.png": "dashboard-pictures",
    "page-charts.png": "screenshots",
    "page-run.png": "screenshots",
    "terminal-run.png": "screenshots",
    "terminal-top-ranks.png": "screenshots",
    "terminal-top.png": "screenshots",
}
"""Each picture, and the target of make that draws it."""

LARGEST_BYTES: Final = 150_000
_Colours = NDArray[np.int64]
_COLOURS: Final = 256
# Three channels in one number.
_PACKED: Final = np.array([256 * 256, 256, 1])
# In steps of the three channels; each distance leaves room for the next.
_APART: Final = (48.0, 24.0, 12.0, 6.0, 0.0)


def save(name: str, png: bytes) -> None:
    """Write a picture to docs/images, in 256 colours: a third of the size of what a browser makes.

    Raises:
        SystemExit: The picture is not in the list, or too large.
    """
    if name not in PICTURES:
        raise SystemExit(f"{name} is not in the list of tools/pictures.py")
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / name
    reduce_colours(Image.open(io.BytesIO(png)).convert("RGB")).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB")
    if size > LARGEST_BYTES:
        raise SystemExit(f"{name} is larger than {LARGEST_BYTES / 1000:.0f} kB")


def reduce_colours(image: Image.Image) -> Image.Image:
    """Return a picture in the colours of :func:`_palette`, each other one replaced by the nearest of them."""
    pixels = np.asarray(image, dtype=np.int64) @ _PACKED
    packed, at, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = packed[:, None] // _PACKED % 256
    palette = _palette(colours, counts)
    # Not by Pillow's own search, which is exact to a few bits only.
    nearest = np.array([np.abs(palette - colour).sum(axis=1).argmin() for colour in colours], dtype=np.uint8)
    reduced = Image.fromarray(nearest[at].reshape(image.height, image.width))
    reduced.putpalette(palette.astype(np.uint8).tobytes())
    return reduced


def _palette(colours: _Colours, counts: _Colours) -> _Colours:
    """Choose colours: those unlike all others first, then frequent ones.

    So a red mark of a few pixels stays red, and a background keeps its colour.

    Args:
        counts: The number of pixels of each colour.
    """
    by_count = colours[np.argsort(-counts)]
    distance = np.full(len(by_count), np.inf)
    chosen: list[int] = []
    for apart in _APART:
        for at, colour in enumerate(by_count):
            if distance[at] > apart and len(chosen) < _COLOURS:
                chosen.append(at)
                distance = np.minimum(distance, np.linalg.norm(by_count - colour, axis=1))
    return by_count[chosen]
