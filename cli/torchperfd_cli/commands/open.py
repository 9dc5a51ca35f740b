"""``torchperfd open``."""

import html
import os
import secrets
import webbrowser
from pathlib import Path
from urllib.parse import quote

import click

from torchperfd.v1 import access, contract, control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import socket_option
from torchperfd_cli.commands._scope import whole_run
from torchperfd_cli.commands.completion import complete_runs
from torchperfd_daemon.errors import DaemonUnreachableError, TorchperfdError
from torchperfd_daemon.web.access import read_token

_TIMEOUT_S = 5.0
_PAGE = "open.html"


@click.command("open")
@click.option("--run", default="", shell_complete=complete_runs, help="Show this run first.")
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
    elif webbrowser.open(_private_page(url).as_uri()):
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


def _private_page(url: str) -> Path:
    """Write a page that leads to an address, for this user alone.

    Other users can see a browser's command line, so the token must not be on it.

    Raises:
        TorchperfdError: It cannot be written.
    """
    path = Path(contract.user_runtime_dir()) / _PAGE
    try:
        directory = access.open_directory(str(path.parent), create=True)
        try:
            part = f".{_PAGE}.{secrets.token_hex(8)}"
            file = access.open_file(directory, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(file, "w") as page:  # noqa: PTH123
                page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">')
            os.replace(part, _PAGE, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise TorchperfdError(
            f"cannot write {path}: {error.strerror or error}", "use `torchperfd open --print-url`"
        ) from error
    return path


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
