"""``torchperfd open``."""

import webbrowser
from urllib.parse import quote

import click

from torchperfd.v1 import contract, control_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._names import whole_run
from torchperfd_daemon.commands._options import socket_option
from torchperfd_daemon.errors import DaemonUnreachableError, TorchperfdError
from torchperfd_daemon.web.access import read_token

_TIMEOUT_S = 5.0


@click.command("open")
@click.option("--run", default="", help="Show this run first.")
@click.option(
    "--print-url",
    is_flag=True,
    help="Print the address, and open nothing. The token is in it.",
)
@socket_option
def command(run: str, print_url: bool, socket: str | None) -> None:
    """Open the daemon's live page in a browser, with the token that starting captures needs.

    The token is in the address's fragment, which browsers do not send. From another machine, forward the
    port with `ssh -L 9407:127.0.0.1:9407 NODE`, and open what `--print-url` prints.
    """
    url = page_url(socket, run)
    if print_url:
        click.echo(url)
    elif webbrowser.open(url):
        click.echo(f"opened {url.partition('#')[0]}", err=True)
    else:
        raise TorchperfdError(
            "no browser can be started here", "open the address of `torchperfd open --print-url`"
        )


def page_url(socket: str | None, run: str = "") -> str:
    """Return the page's address, with the token.

    Args:
        socket: The daemon's; the usual places when None.
        run: The run to show; empty for all.

    Raises:
        TorchperfdError: No daemon answers, or this user may not read its token.
    """
    path, metrics_url, name = _daemon(socket, run)
    view = f"runs/{quote(name, safe='')}" if name else ""
    return f"{metrics_url.removesuffix('metrics')}{view}#token={read_token(path)}"


def _daemon(socket: str | None, run: str) -> tuple[str, str, str]:
    """Return the socket of the first daemon that answers, its metrics page, and a run's whole name."""
    paths = (socket,) if socket else tuple(contract.socket_candidates())
    for path in paths:
        try:
            with connect(path) as daemon:
                info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_TIMEOUT_S)
                return path, info.metrics_url, whole_run(daemon, run)
        except DaemonUnreachableError:
            if path == paths[-1]:
                raise
    raise AssertionError("there is always a path")
