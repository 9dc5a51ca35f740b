"""One line on a terminal's stderr that is written again and again, and removed at the end."""

import shutil
import sys

import click

from torchperfd_daemon.text import printable


class StatusLine:
    """What a command is doing; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._is_on = sys.stderr.isatty()

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
