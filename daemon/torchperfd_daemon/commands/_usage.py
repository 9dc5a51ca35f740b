"""Errors in the use of a command, in the style of all others: one line, with what to do."""

import difflib
import re
from typing import Final

import click

from torchperfd_daemon.text import printable

_NO_COMMAND: Final = re.compile(r"No such command '([^']*)'")
_MOST_SUGGESTED: Final = 2


def usage_text(error: click.ClickException) -> str:
    """Return an error as one line; the help itself where a command was given nothing at all."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    words = " ".join(error.format_message().split()).rstrip(".")
    words = f"{words[:1].lower()}{words[1:]}"
    hint = _suggestion(error.format_message(), context)
    if context is None:
        return printable(f"torchperfd: {words}{hint}")
    see = f"see `{context.command_path} --help`"
    joint = " " if words.endswith("?") or hint.endswith("?") else "; "
    return printable(f"torchperfd: {words}{hint}{joint}{see}")


def _suggestion(message: str, context: click.Context | None) -> str:
    """Return the commands that an unknown one may have meant; empty if there are none."""
    match = _NO_COMMAND.search(message)
    if match is None or context is None or not isinstance(context.command, click.Group):
        return ""
    names = context.command.list_commands(context)
    close = difflib.get_close_matches(match[1], names, n=_MOST_SUGGESTED, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
