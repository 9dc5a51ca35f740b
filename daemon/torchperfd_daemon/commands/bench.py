"""``torchperfd bench``."""

import click

from torchperfd_daemon.commands import _bench_compare, _bench_dataloader


@click.group("bench")
def command() -> None:
    """Measure parts of a training script by themselves, in a process of their own."""


command.add_command(_bench_dataloader.command)
command.add_command(_bench_compare.command)
