"""The ``torchperfd`` command: a table of contents; each command is a module of its own."""

import importlib
import os
import sys
from typing import Any, Final

import click

from torchperfd._version import __version__
from torchperfd_daemon.commands._examples import examples_text
from torchperfd_daemon.commands._usage import usage_text
from torchperfd_daemon.errors import TorchperfdError, check_environment
from torchperfd_daemon.text import printable

COMMANDS: Final = {
    "run": "Run a training script under torchperfd, unedited.",
    "serve": "Run the node's daemon.",
    "open": "Open the live page in a browser.",
    "ps": "List runs and ranks.",
    "top": "Show runs, ranks, this node and the verdict, refreshing.",
    "ranks": "Show how each rank spends its steps, and which one is slow.",
    "steps": "List a rank's newest steps.",
    "diagnose": "Explain why a run is slow, where, and what to do next.",
    "explain": "Explain a cause: its meaning, how to confirm it, the fix.",
    "whatif": "Predict how much faster a run were without each cause.",
    "capture": "Profile the next steps of a running job.",
    "captures": "List, fetch and delete captures.",
    "stacks": "Show the stacks of all ranks, and the one others wait for.",
    "goodput": "Show how every rank-second of a run was spent, across restarts.",
    "analyze": "Show how the time of a trace was spent.",
    "runs": "List the runs whose reports are kept.",
    "compare": "Show what changed between two runs, two captures, or two ranks.",
    "bench": "Measure a DataLoader's settings, or compare implementations.",
    "tune": "Find faster settings for a training script, verified.",
    "doctor": "Find what slows this node down, and how to fix it.",
    "dashboards": "Write Grafana's dashboards and Prometheus' rules.",
    "completion": "Print the completion script of a shell.",
    "config": "Show the configuration in force, and the origin of each value.",
    "version": "Print versions.",
}


GROUPS: Final = {
    "Run and watch": (
        "run",
        "top",
        "open",
        "ps",
        "ranks",
        "steps",
        "diagnose",
        "explain",
        "whatif",
        "stacks",
        "goodput",
    ),
    "Capture and analyse": ("capture", "captures", "analyze", "compare", "runs", "bench", "tune"),
    "The node": ("doctor", "serve", "config", "dashboards", "completion", "version"),
}
"""The commands as the help groups them."""

_TRAINING: Final = ("run", "serve")
"""Commands that check the variables themselves: a misspelt one must not end a training or its daemon."""


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"torchperfd_daemon.commands.{cmd_name}")
        command: click.Command = module.command
        if not command.epilog:
            command.epilog = examples_text(cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        grouped = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in COMMANDS if name not in grouped)
        for title, names in {**GROUPS, "Others": others}.items():
            rows = [(name, COMMANDS[name]) for name in names if name in COMMANDS]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="torchperfd")
@click.pass_context
def cli(context: click.Context, /) -> None:
    """Why is my PyTorch training slow, and which rank is slow?"""
    if context.invoked_subcommand not in _TRAINING:
        check_environment(os.environ)


cli.epilog = examples_text("")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit the process with its documented code."""
    sys.exit(run_command(argv))


def run_command(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result: Any = cli.main(args=argv, prog_name="torchperfd", standalone_mode=False)
    except TorchperfdError as error:
        # Errors contain names of runs and files, and text of traces.
        click.echo(printable(f"torchperfd: {error}"), err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(usage_text(error), err=True)
        return error.exit_code
    except click.Abort:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has exited (`torchperfd ps | head`): not an error.
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0
