"""Errors in the use of a command, in the style of all others: one line, with what to do."""

import re
from typing import Final

import click

from torchperfd.model.formatting import did_you_mean
from torchperfd_daemon.text import printable

_NO_COMMAND: Final = re.compile(r"No such command '([^']*)'")


def usage_text(error: click.ClickException) -> str:
    """Return an error as one line; the help itself where a command was given nothing at all."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message()
    words, hint = _words(error, context)
    hint = f"; {hint}" if hint else ""
    if context is None:
        return printable(f"torchperfd: {words}{hint}")
    see = f"see `{context.command_path} --help`"
    joint = " " if words.endswith("?") or hint.endswith("?") else "; "
    return printable(f"torchperfd: {words}{hint}{joint}{see}")


def _words(error: click.ClickException, context: click.Context | None) -> tuple[str, str]:
    """Return what is wrong, and which name may be meant; the latter empty if none is near."""
    if isinstance(error, click.NoSuchOption) and context is not None:
        options = [name for each in context.command.get_params(context) for name in each.opts]
        return f"no such option {error.option_name!r}", did_you_mean(error.option_name, options)
    words = " ".join(error.format_message().split()).rstrip(".")
    match = _NO_COMMAND.search(words)
    if match is not None and context is not None and isinstance(context.command, click.Group):
        # Newer versions of click suggest a name as well, in words of their own.
        return f"no such command '{match[1]}'", did_you_mean(match[1], context.command.list_commands(context))
    return f"{words[:1].lower()}{words[1:]}", ""
