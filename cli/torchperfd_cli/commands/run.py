"""``torchperfd run``: hands over to the client library, which runs inside the training process."""

import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from torchperfd.launch.options import (
    HELP_OPTIONS,
    MODULE_OPTION,
    OPTIONS,
    BadUsageError,
    option_of,
    read_words,
)
from torchperfd.model.own_commands import script_command
from torchperfd_cli.commands._options import complete_file, kept_run_items


class _Run(click.Command):
    """The command, whose words the client reads: click would take some of the script's for its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["arguments"] = tuple(args)
        return []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return _complete(ctx.params["arguments"], incomplete)


@click.command("run", cls=_Run)
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=lambda context, _, incomplete: _complete(context.params["arguments"], incomplete),
)
def run_command(arguments: tuple[str, ...]) -> None:
    """Run a training script under torchperfd, unedited, and show where its time went."""
    # exec, not a child: the script keeps this pid, stdin, terminal and exit code.
    sys.stdout.flush()
    os.execv(sys.executable, script_command("torchperfd.__main__", "run", *arguments))


def _complete(words: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return what the word behind others may be: an option, its value, the script, or one of its files."""
    try:
        line = read_words(words)
    except BadUsageError:
        return []
    option = option_of(line.awaited)
    if line.target:
        return complete_file(incomplete)
    if option is not None and option.takes == "run":
        return [*complete_file(incomplete), *kept_run_items(line.values.get("--runs-dir", ""), incomplete)]
    if option is not None and option.takes:
        return complete_file(incomplete, only_directories=option.takes == "directory")
    if line.awaited or line.wants_help:
        return []
    if incomplete.startswith("-"):
        names = (*(each.name for each in OPTIONS), *HELP_OPTIONS, MODULE_OPTION)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return complete_file(incomplete)
