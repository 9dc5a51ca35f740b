"""Which framework runs the training loop."""

import sys
from types import FrameType
from typing import Final

# Packages whose loops call the script, by what people call them. Those that a script's own loop calls
# into, such as accelerate, are none.
_LOOPS: Final = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
    "fastai": "fastai",
    "ignite": "ignite",
    "composer": "composer",
}


def framework_around(thread: int) -> str:
    """Return the framework whose loop a thread is in, by its frames now; empty for a plain loop.

    Of frameworks within one another the outermost counts. An imported package is no evidence:
    many a plain loop takes its model or its metrics from one.

    Args:
        thread: As ``threading.get_ident()`` numbers it.
    """
    found = ""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if isinstance(module, str):
            found = _LOOPS.get(module.partition(".")[0], found)
        frame = frame.f_back
    return found
