"""``torchperfd completion``."""

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_TORCHPERFD_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options, names of runs and ids of captures."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"{shell} is not known to click", context)
    root = context.find_root()
    click.echo(kind(root.command, {}, "torchperfd", _VARIABLE).source())
