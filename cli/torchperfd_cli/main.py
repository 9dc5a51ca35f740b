"""The ``torchperfd`` command: a table of contents, examples below each help, and errors in its use.

A command's module is imported only when that command is used.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import click

from torchperfd._version import __version__
from torchperfd.document.text import printable
from torchperfd.model.formatting import did_you_mean
from torchperfd_daemon.errors import TorchperfdError, check_environment

EXAMPLES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "": (
        ("torchperfd run train.py --epochs 3", "train, and end with what was slow and how to change it"),
        ("torchrun --nproc-per-node 4 -m torchperfd run train.py", "the same with several ranks"),
        ("torchperfd top", "watch a job that runs"),
        ("torchperfd capture", "profile its next five steps"),
    ),
    "serve": (
        ("torchperfd serve", "run the daemon of this node"),
        ("torchperfd serve --demo", "with a simulated job on eight GPUs"),
    ),
    "ps": (("torchperfd ps --watch", "again each second"), ("torchperfd ps --fleet", "runs on all nodes")),
    "top": (("torchperfd top", "all runs; ? shows the keys"), ("torchperfd top --run bert", "one run")),
    "ranks": (
        ("torchperfd ranks", "which rank do the others wait for?"),
        ("torchperfd ranks --last 32 --watch", "over the newest 32 steps, again each second"),
    ),
    "steps": (("torchperfd steps --rank 0 --last 10", "the newest ten steps of rank 0"),),
    "diagnose": (
        ("torchperfd diagnose", "why is it slow now?"),
        ("torchperfd diagnose --json", "the same for a program"),
    ),
    "explain": (
        ("torchperfd explain input-bound", "what it means, how to confirm it, and the fix"),
        ("torchperfd explain", "all causes"),
    ),
    "whatif": (("torchperfd whatif", "what would be gained without each cause?"),),
    "capture": (
        ("torchperfd capture", "the next five steps of the only run"),
        ("torchperfd capture --steps 3 --with-stack", "with the lines of the script"),
        ("torchperfd capture --kind memory", "CUDA memory instead of time"),
    ),
    "captures": (
        ("torchperfd captures list", "what there is"),
        ("torchperfd captures get 20261127 -o traces", "copy one, by a prefix of its id"),
    ),
    "stacks": (("torchperfd stacks", "where does each rank stand, and which one blocks the others?"),),
    "tune": (
        ("torchperfd tune train.py", "which settings make it faster, and by how much?"),
        ("torchperfd tune --only loader train.py", "only those of its DataLoader"),
    ),
    "goodput": (("torchperfd goodput --run bert", "what became of each second, across restarts"),),
    "history": (
        ("torchperfd history", "which views and tables are there?"),
        ("torchperfd history worst_nodes --lake s3://bucket/torchperfd", "one of the views"),
    ),
    "analyze": (
        ("torchperfd analyze 20261127", "a capture, by a prefix of its id"),
        ("torchperfd analyze rank0.json --html page.html", "a trace, as a page"),
    ),
    "compare": (
        ("torchperfd compare train-3f train-77", "two runs, by a prefix of their ids"),
        ("torchperfd compare 20261127-2210 20261127-2231 --html page.html", "two captures, as a page"),
    ),
    "runs": (
        ("torchperfd runs show train-3f", "its verdict, phases and ranks"),
        ("torchperfd runs show train-3f --html run.html", "the same as a page"),
    ),
    "doctor": (
        ("torchperfd doctor", "what slows this node down, and how to fix it"),
        ("torchperfd doctor --daemon", "what is wrong with its daemon"),
    ),
    "dashboards": (("torchperfd dashboards export grafana", "dashboards and alerts, as files"),),
    "config": (
        ("torchperfd config show --origin", "each option of the daemon, and where it is set"),
        ("torchperfd config check", "can a daemon start with it?"),
    ),
    "completion": (
        ("torchperfd completion bash > ~/.local/share/bash-completion/completions/torchperfd", "bash"),
        ("torchperfd completion zsh > ~/.zfunc/_torchperfd", "zsh, with ~/.zfunc in fpath"),
        ("torchperfd completion fish > ~/.config/fish/completions/torchperfd.fish", "fish"),
    ),
}


def examples_text(name: str) -> str:
    """Return the examples of a command for the end of its help, as click lays it out; empty without any."""
    found = EXAMPLES.get(name, ())
    if not found:
        return ""
    lines = [line for command, words in found for line in (f"  $ {command}", f"      {words}")]
    return "\b\n" + "\n".join(["Examples:", *lines])


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


GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Run and watch": {
        "run": "Run a training script under torchperfd, unedited.",
        "top": "Show runs, ranks, this node and the verdict, refreshing.",
        "open": "Open the live page in a browser.",
        "ps": "List runs and ranks.",
        "ranks": "Show how each rank spends its steps, and which one is slow.",
        "steps": "List a rank's newest steps.",
        "diagnose": "Explain why a run is slow, where, and what to do next.",
        "explain": "Explain a cause: its meaning, how to confirm it, the fix.",
        "whatif": "Predict how much faster a run were without each cause.",
        "stacks": "Show the stacks of all ranks, and the one others wait for.",
        "history": "Ask the lake about all nodes, with shipped views or SQL.",
        "goodput": "Show how every rank-second of a run was spent, across restarts.",
    },
    "Capture and analyse": {
        "capture": "Profile the next steps of a running job.",
        "captures": "List, fetch and delete captures.",
        "analyze": "Show how the time of a trace was spent.",
        "compare": "Show what changed between two runs, two captures, or two ranks.",
        "runs": "List the runs whose reports are kept.",
        "bench": "Measure a DataLoader's settings, or compare implementations.",
        "tune": "Find faster settings for a training script, verified.",
    },
    "The node": {
        "doctor": "Find what slows this node down, and how to fix it.",
        "serve": "Run the node's daemon.",
        "config": "Show or check the configuration, and the origin of each value.",
        "dashboards": "Write Grafana's dashboards and Prometheus' rules.",
        "completion": "Print the completion script of a shell.",
        "version": "Print versions.",
    },
}
"""The commands and what they do, as the help groups them."""

COMMANDS: Final = {name: words for commands in GROUPS.values() for name, words in commands.items()}

MODULES: Final = {
    "completion": "_options",
    "config": "serve",
    "dashboards": "open",
    "explain": "diagnose",
    "stacks": "diagnose",
}
"""The modules of commands that are in one with others; the name of any other module is its command's."""

_TRAINING: Final = ("run", "serve")
"""Commands that check the variables themselves: a misspelt one must not end a training or its daemon."""


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"torchperfd_cli.commands.{MODULES.get(name, name)}")


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(command_module(cmd_name), f"{cmd_name}_command")
        if not command.epilog:
            command.epilog = examples_text(cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([*commands.items()])


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
