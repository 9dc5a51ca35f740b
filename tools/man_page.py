"""Write the man page of ``torchperfd`` from the command line itself: ``man_page.py [FILE]``."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from torchperfd.launch.options import usage
from torchperfd_cli.main import COMMANDS, cli

PATH: Final = Path(__file__).resolve().parents[1] / "deploy" / "man" / "torchperfd.1"

_ENVIRONMENT: Final = (
    ("TORCHPERFD_SOCKET", "The only socket that commands and training processes try."),
    ("TORCHPERFD_CAPTURES_DIR", "The directory of captures."),
    ("TORCHPERFD_RUN", "The name of the run, under launchers that choose one themselves."),
    ("NO_COLOR", "Leaves colours out, if it is not empty."),
)
_EXIT_CODES: Final = (
    ("0", "Success."),
    ("1", "A failure, or findings of doctor."),
    ("2", "The command line is invalid."),
    ("3", "There is no such run, rank, capture or file."),
    ("4", "No daemon answers."),
    ("5", "The result is partial: ranks or nodes are missing."),
    ("6", "Both sides have no common version of the protocol."),
    ("7", "Something is slower than was allowed."),
    ("124", "It has not ended in time."),
)


def man_page() -> str:
    """Return the page in roff."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield '.TH TORCHPERFD 1 "" "torchperfd" "User Commands"'
    yield from (".SH NAME", r"torchperfd \- why is PyTorch training slow, and which rank is slow?")
    yield from (".SH SYNOPSIS", r".B torchperfd", r"\fICOMMAND\fR [\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", escape("Data goes to stdout, messages to stderr."))
    yield escape("Runs and captures are named by any unique prefix. Read commands take --json.")
    yield ".SH COMMANDS"
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if name == "run":
            # Its options are read in the training process, not by click.
            yield from ('.SS "torchperfd run"', ".nf", *map(escape, usage().splitlines()), ".fi")
        elif command is not None:
            yield from _command(command, f"torchperfd {name}", COMMANDS[name])
    for title, rows in (("ENVIRONMENT", _ENVIRONMENT), ("EXIT STATUS", _EXIT_CODES)):
        yield f".SH {title}"
        for term, words in rows:
            yield from (".TP", rf"\fB{escape(term)}\fR", escape(words))


def _command(command: click.Command, path: str, summary: str) -> Iterator[str]:
    """Yield a command, its options and examples, and the commands that it groups."""
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "{escape(path)} {escape(usage)}"'
    text = (command.help or summary).replace("\b", "")
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        yield from ([".PP"] if number else [])
        yield escape(" ".join(paragraph.split()))
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", rf"\fB{escape(record[0])}\fR", escape(" ".join(record[1].split())))
    if command.epilog:
        yield from (".PP", ".nf")
        yield from map(escape, command.epilog.replace("\b", "").strip().splitlines())
        yield ".fi"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _command(inner, f"{path} {name}", "")


def escape(text: str) -> str:
    """Return a text that roff shows as it is."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(man_page(), encoding="utf-8")
    print(target)
