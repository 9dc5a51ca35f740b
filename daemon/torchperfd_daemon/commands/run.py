"""``torchperfd run``: hands over to the client library, which runs inside the training process."""

import os
import sys

import click


@click.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run a training script under torchperfd, unedited, and show where its time went."""
    # exec, not a child: the script keeps this pid, stdin, terminal and exit code.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torchperfd", "run", *arguments])
