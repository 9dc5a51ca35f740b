"""Shows output once, or repeatedly until Ctrl-C."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from typing import Final

import click

from torchperfd_daemon.errors import PartialResultError

_EVERY_S: Final = 1.0
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"

NO_RUNS: Final = "no training runs under torchperfd on this machine; start one with `torchperfd run train.py`"

watch_option = click.option("--watch", is_flag=True, help="Again each second, until Ctrl-C.")


def show(frame: Callable[[], tuple[str, str]], *, watch: bool, as_json: bool) -> None:
    """Print a frame, and what is missing in it; when watching, again each second.

    On a terminal a frame replaces the previous one. Elsewhere a blank line separates two, and
    documents are one line each.

    Args:
        frame: Returns the text, or the document, and what is missing in it; empty when there is no run, or
            nothing missing.
        as_json: Whether frames are documents.

    Raises:
        PartialResultError: Something is missing, without ``watch``.
    """
    if not watch:
        text, missing = frame()
        _print(text)
        if missing:
            raise PartialResultError(missing)
        return
    on_terminal = not as_json and sys.stdout.isatty()
    try:
        while True:
            text, missing = frame()
            if on_terminal:
                click.echo(_HOME_AND_CLEAR, nl=False)
            _print(text)
            if missing:
                click.echo(missing, err=True)
            if not on_terminal and not as_json:
                click.echo()
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return


def again(
    once: Callable[[], None],
    *,
    watch: bool,
    as_json: bool,
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Run a command that prints; when watching, again each second until Ctrl-C.

    A result that is partial is reported and does not end the watching. On a terminal, the previous output
    stays until the next is complete.

    Raises:
        TorchperfdError: The command has failed.
    """
    if not watch:
        once()
        return
    on_terminal = not as_json and sys.stdout.isatty()
    try:
        while True:
            problem = _replace_screen(once) if on_terminal else _problem_of(once)
            if problem:
                click.echo(problem, err=True)
            if not on_terminal and not as_json:
                click.echo()
            (sleep or time.sleep)(_EVERY_S)
    except KeyboardInterrupt:
        return


class _Screen(io.StringIO):
    """What a command prints for a terminal, until all of it is there."""

    def isatty(self) -> bool:
        """Return that it is for a terminal."""
        return True


def _replace_screen(once: Callable[[], None]) -> str:
    """Run a command, and then replace what the terminal shows by its output; return what is missing in it."""
    screen = _Screen()
    with contextlib.redirect_stdout(screen):
        problem = _problem_of(once)
    click.echo(f"{_HOME_AND_CLEAR}{screen.getvalue()}", nl=False)
    return problem


def _problem_of(once: Callable[[], None]) -> str:
    """Run a command; return what is missing in its result, empty when nothing is."""
    try:
        once()
    except PartialResultError as error:
        return str(error)
    return ""


def _print(text: str) -> None:
    if text:
        click.echo(text)
    else:
        click.echo(NO_RUNS, err=True)
