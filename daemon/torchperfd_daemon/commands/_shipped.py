"""Files that come with the package: in the wheel below it, in a checkout in folders of their own."""

import re
from pathlib import Path
from typing import Final

import torchperfd_daemon

LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
"""A link in a Markdown page: its text and its target."""


def shipped_folders(in_wheel: str, *in_checkout: str) -> tuple[Path, ...]:
    """Return the folders that hold files of one kind; they may not exist.

    Args:
        in_wheel: The folder below the package.
        in_checkout: The folders below the root of a checkout.
    """
    package = Path(torchperfd_daemon.__file__).parent
    if (package / in_wheel).is_dir():
        return (package / in_wheel,)
    return tuple(package.parents[1] / name for name in in_checkout)
