"""``torchperfd serve``."""

import asyncio
import sys
from pathlib import Path
from typing import Any, Final

import click

from torchperfd_daemon.commands._serve_flags import configuration, serve_flags
from torchperfd_daemon.logs import configure_logging

_SWITCH_INTERVAL_S: Final = 0.0005
"""A tenth of Python's default. The event loop releases the interpreter at each system call, and waits for up
to this time to have it again while a thread of the samplers computes."""


@click.command("serve")
@serve_flags(hidden=False)
@click.pass_context
def command(context: click.Context, /, config_file: Path | None, **_: Any) -> None:
    """Run the node's daemon in the foreground.

    It receives step timings over a unix socket, samples the node, and serves Prometheus
    metrics. SIGTERM ends it within 10 seconds; SIGHUP has it read its credentials and certificates again.

    Each option can also be set by a variable (--interval by TORCHPERFD_INTERVAL) and in a file
    (interval = 1.0); `torchperfd config show` prints the values in force.
    """
    config = configuration(context, config_file)
    settings = config.serve_settings()
    configure_logging(settings.log_level)
    from torchperfd_daemon.server.daemon import Daemon
    from torchperfd_daemon.server.listening import AlreadyServedError

    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    async def serve() -> None:
        await Daemon(settings, config.plan).run()

    try:
        asyncio.run(serve())
    except AlreadyServedError:
        # Two ranks may start an embedded daemon at once: one of them is enough.
        if not settings.embedded:
            raise
