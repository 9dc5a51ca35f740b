"""Golden files: texts that a test compares with, kept under ``tests/golden``."""

import os
from pathlib import Path
from typing import Final

GOLDEN: Final = Path(__file__).parents[1] / "golden"
# Read at import: no test sees a variable of ours.
_REWRITE: Final = bool(os.environ.get("TORCHPERFD_REWRITE_GOLDEN"))


def check_golden(name: str, text: str) -> None:
    """Compare a text with a golden file; with ``TORCHPERFD_REWRITE_GOLDEN=1`` write the file first."""
    golden = GOLDEN / name
    if _REWRITE:
        golden.write_text(text)
    assert text == golden.read_text()
