"""The output of commands: tables and text that fit the terminal, numbers, status lines, ``--html`` pages.

Commands that measure this machine warn if it is busy.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TypeAlias

import click

from torchperfd.document.blocks import Code, Document, FirstThatFits
from torchperfd.document.tables import Table
from torchperfd.document.terminal import Page, render
from torchperfd.document.text import printable
from torchperfd.v1.access import write_file
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_daemon.errors import PartialResultError, explained

INTERRUPTED: Final = 130
_TERMINATED: Final = 128 + signal.SIGTERM
_BUSY: Final = 0.5
_SAMPLE_S: Final = 0.5


class Interruption:
    """How a measurement was ended early.

    Attributes:
        exit_code: What the command returns then: 130 after Ctrl-C, 143 after SIGTERM.
    """

    exit_code: int = INTERRUPTED


@contextlib.contextmanager
def results_on_sigterm() -> Iterator[Interruption]:
    """Let SIGTERM end a measurement as Ctrl-C does, so that what was measured by then is printed.

    Batch systems and `timeout` send it. A second one ends the process at once.
    """
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found.exit_code = _TERMINATED
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)


def warn_if_busy() -> None:
    """Write a warning if other programs already use the machine's CPUs; takes half a second."""
    import psutil

    share = psutil.cpu_percent(_SAMPLE_S) / 100
    if share >= _BUSY:
        note(f"torchperfd: other programs use {share:.0%} of the CPUs: only large gains can be verified now")


def count(number: int, noun: str) -> str:
    """Return how many there are of something: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_PIPE: Final = 80
"""Columns that tables of phases fit in a pipe: the smallest phases share a column, and nothing is cut."""


def page() -> Page:
    return Page.of(sys.stdout)


Shown: TypeAlias = Document | Mapping[str, Any]
"""What a command shows: a document for people, or one for programs."""


def emit(shown: Shown, form: Literal["text", "markdown", "csv"] = "text", on: Page | None = None) -> None:
    """Print a document for people in a form, or one for programs as JSON in a line; nothing if it is empty.

    A list of a document for programs may be an iterator: then it is never in memory as a whole.

    Args:
        on: The page of text; the one that stdout is when None.
    """
    if not isinstance(shown, Document):
        for piece in _json_line(shown):
            click.echo(piece, nl=False)
    elif form != "text":
        from torchperfd.document.markup import render_csv, render_markdown

        click.echo(render_markdown(shown) if form == "markdown" else printable(render_csv(shown)), nl=False)
    elif text := render(shown, on or page()):
        click.echo(text, color=True)


def _json_line(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the line of a JSON object: whole, or with the items of iterators one at a time."""
    streamed = [key for key, value in document.items() if isinstance(value, Iterator)]
    if not streamed:
        yield f"{json.dumps(document)}\n"
        return
    for number, (key, value) in enumerate(document.items()):
        yield f"{', ' if number else '{'}{json.dumps(key)}: "
        if key not in streamed:
            yield json.dumps(value)
            continue
        yield "["
        for count, item in enumerate(value):
            yield f"{', ' if count else ''}{json.dumps(item)}"
        yield "]"
    yield "}\n"


def plain(*lines: str) -> Document:
    """Return lines that stay whole, to be copied or read by a script."""
    return Document([[Code(lines)]])


def note(line: str) -> None:
    """Print a line on stderr: what was done or decided, not the answer."""
    click.echo(printable(line), err=True)


def limit_notes(shown: int, total: int) -> list[str]:
    """Return the note below a table that has the newest rows only; none below one that has all."""
    return [f"these are the newest {shown} of {total:,}; --limit 0 shows all"] * (shown < total)


def fitted_phases(
    names: Sequence[str],
    sizes: Mapping[str, float],
    make: Callable[[Sequence[str], Sequence[str]], Table],
) -> FirstThatFits:
    """Return a table with a column for each name; the smallest share one, so that it fits.

    Args:
        make: Returns the table with columns of their own, and with those that are summed up.
    """

    def tables() -> Iterator[Table]:
        own, summed = list(names), list[str]()
        yield make(own, summed)
        while len(own) > 1:
            summed.append(min(own, key=lambda name: sizes.get(name, 0.0)))
            own.remove(summed[-1])
            yield make(own, summed)

    return FirstThatFits(tables, plain_width=_PIPE)


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
        if self._is_on:
            text = printable(text.replace("\n", " "))[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r\x1b[2K{text}", err=True, nl=False)


html_option = click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page to FILE that opens from disk, without a request.",
)


def write_page(file: Path, page: str, hint: str = "") -> None:
    """Write a page to a file, and print its size on stderr.

    Args:
        hint: What else the reader may want, in a few words.

    Raises:
        TorchperfdError: It cannot be written.
    """
    with explained(f"cannot write {file}", "name another file"):
        write_file(file, page.encode())
    more = f"; {hint}" if hint else ""
    note(f"torchperfd: wrote {file} ({len(page) / 1e6:.1f} MB), a page for any browser{more}")


_EVERY_S: Final = 1.0
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"

NO_RUNS: Final = "no training runs under torchperfd on this machine; start one with `torchperfd run train.py`"

watch_option = click.option("--watch", is_flag=True, help="Again each second, until Ctrl-C.")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command answers.

    Attributes:
        shown: None for nothing; an empty document if there is no run.
        missing: What is missing in it; empty if nothing is.
    """

    shown: Shown | None = None
    notes: Sequence[str] = ()
    missing: str = ""
    exit_code: int = 0


def show(answer: Callable[[], Answer], *, watch: bool, as_json: bool) -> int:
    """Print an answer, and return its exit code; when watching, print a new one each second.

    On a terminal an answer replaces the previous one. Elsewhere a blank line separates two, and documents for
    programs are one line each.

    Raises:
        PartialResultError: Something is missing, without ``watch``.
    """
    exit_code = 0

    def once() -> None:
        nonlocal exit_code
        found = answer()
        exit_code = found.exit_code
        if isinstance(found.shown, Document) and not found.shown.sections:
            note(NO_RUNS)
        elif found.shown is not None:
            emit(found.shown)
        for line in found.notes:
            note(line)
        if found.missing:
            raise PartialResultError(found.missing)

    again(once, watch=watch, as_json=as_json)
    return exit_code


def live(command: Callable[..., Answer]) -> Callable[..., int]:
    """Print what a command answers, also again and again: adds ``--watch``, ``--socket`` and ``--json``."""

    @watch_option
    @socket_option
    @json_option
    @functools.wraps(command)
    def run(*, watch: bool, as_json: bool, **options: Any) -> int:
        return show(lambda: command(as_json=as_json, **options), watch=watch, as_json=as_json)

    return run


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
                note(problem)
            if not on_terminal and not as_json:
                click.echo()
            (sleep or time.sleep)(_EVERY_S)
    except KeyboardInterrupt:
        return


class _Screen(io.StringIO):
    """What a command prints for a terminal, until all of it is there."""

    def isatty(self) -> bool:
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
