"""Showing something once, or again and again until Ctrl-C."""

import sys
import time
from collections.abc import Callable
from typing import Final

import click

_EVERY_S: Final = 1.0
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"

NO_RUNS: Final = "no runs; start one with `torchperfd run train.py`"

watch_option = click.option("--watch", is_flag=True, help="Again each second, until Ctrl-C.")


def show(frame: Callable[[], str], *, watch: bool, as_json: bool) -> None:
    """Print what there is to show; when watching, again each second.

    On a terminal a frame takes the place of the one before. Elsewhere a blank line lies between two, and
    documents are one line each.

    Args:
        frame: Returns the text, or the document; empty when there is no run.
        watch: Whether to go on.
        as_json: Whether frames are documents.
    """
    if not watch:
        _tell(frame())
        return
    redraw = not as_json and sys.stdout.isatty()
    try:
        while True:
            text = frame()
            if redraw:
                click.echo(_HOME_AND_CLEAR, nl=False)
            _tell(text)
            if not redraw and not as_json:
                click.echo()
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return


def _tell(text: str) -> None:
    if text:
        click.echo(text)
    else:
        click.echo(NO_RUNS, err=True)
