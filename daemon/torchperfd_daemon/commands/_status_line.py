"""One line on a terminal's stderr that is written again and again, and removed at the end."""

import os
import shutil
import sys

import click

from torchperfd_daemon.text import printable


def can_redraw() -> bool:
    """Return whether stderr is a terminal on which lines can be replaced."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class StatusLine:
    """What a command is doing; nothing where lines cannot be replaced."""

    def __init__(self) -> None:
        self._is_on = can_redraw()

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            click.echo("\r\x1b[2K", err=True, nl=False)

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._is_on:
            text = printable(text.replace("\n", " "))[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r\x1b[2K{text}", err=True, nl=False)
