"""The address of the daemon's live page, printed once when a run begins."""

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchperfd.own_commands import own_command
from torchperfd.v1.variables import known_environment

if TYPE_CHECKING:
    from torchperfd.client import Client


def announce(client: "Client", *, quiet: bool, open_page: bool) -> None:
    """Print the page's address as soon as the daemon has named it, and open it where that is asked for.

    Only rank 0 does so, and only for a daemon with a page.

    Args:
        quiet: Print nothing.
        open_page: Start ``torchperfd open``, which finds a browser and the page's token.
    """
    if client.rank != 0 or (quiet and not open_page):
        return

    def on_page(metrics_url: str) -> None:
        if not quiet:
            sys.stderr.write(f"torchperfd: live page at {metrics_url.removesuffix('metrics')}\n")
            sys.stderr.flush()
        if open_page:
            _open(client.run)

    client.parts.daemon_session.when_page_is_known(on_page)


def _open(run: str) -> None:
    # Its name may be another one on this node, and the page then shows all runs.
    subprocess.Popen(
        own_command("torchperfd_daemon", "open", "--run", run),
        env=known_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
