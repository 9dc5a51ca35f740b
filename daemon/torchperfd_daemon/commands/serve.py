"""``torchperfd serve``."""

import asyncio
import logging
import sys
from pathlib import Path

import click

from torchperfd.v1 import contract
from torchperfd_daemon.commands._options import Age, Bytes, Seconds
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.settings import ServeSettings


@click.command("serve")
@click.option("--socket", help="Unix socket for clients; this user's own by default.")
@click.option("--socket-mode", default="600", show_default=True, help="Permissions of the socket, octal.")
@click.option(
    "--metrics-address",
    default="127.0.0.1:9407",
    show_default=True,
    help="HOST:PORT of the metrics page; port 0 takes any free one.",
)
@click.option(
    "--web.config.file",
    "web_config_file",
    type=click.Path(path_type=Path),
    help="TLS and basic auth of the metrics page, in the format of Prometheus exporters.",
)
@click.option("--captures-dir", type=click.Path(path_type=Path), help="Where traces are kept.")
@click.option(
    "--captures-max-bytes",
    type=Bytes(),
    default="20GiB",
    show_default=True,
    help="Of all captures on the disk; the oldest are removed beyond. 0 is no limit, here and below.",
)
@click.option(
    "--captures-max-age",
    type=Age(),
    default="0",
    show_default=True,
    help="Remove captures that are older, like 30d.",
)
@click.option(
    "--captures-max-count",
    type=click.IntRange(0),
    default=10_000,
    show_default=True,
    help="How many captures; the oldest are removed beyond.",
)
@click.option(
    "--captures-max-bytes-each",
    type=Bytes(),
    default="4GiB",
    show_default=True,
    help="Of one capture; its ranks have equal shares, and a larger trace is not kept.",
)
@click.option(
    "--captures-min-free",
    type=Bytes(),
    default="1GiB",
    show_default=True,
    help="Begin no capture with less free on the disk.",
)
@click.option(
    "--interval",
    type=Seconds(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two samples of the node.",
)
@click.option("--demo", is_flag=True, help="Show simulated GPUs and ranks, to try things out without any.")
@click.option("--embedded", is_flag=True, hidden=True, help="Stop when standard input closes.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def command(
    socket: str | None,
    socket_mode: str,
    metrics_address: str,
    web_config_file: Path | None,
    captures_dir: Path | None,
    captures_max_bytes: int,
    captures_max_age: float,
    captures_max_count: int,
    captures_max_bytes_each: int,
    captures_min_free: int,
    interval: float,
    demo: bool,
    embedded: bool,
    log_level: str,
) -> None:
    """Run the node's daemon in the foreground.

    It receives step timings over a unix socket, samples the node, and serves Prometheus
    metrics. SIGTERM ends it within 10 seconds.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    host, port = _address(metrics_address)
    settings = ServeSettings(
        socket=socket or contract.user_socket(),
        socket_mode=_mode(socket_mode),
        metrics_host=host,
        metrics_port=port,
        web_config_file=web_config_file.absolute() if web_config_file else None,
        captures_dir=(captures_dir or Path(contract.user_captures_dir())).absolute(),
        captures_max_bytes=captures_max_bytes,
        captures_max_age_seconds=captures_max_age,
        captures_max_count=captures_max_count,
        captures_max_bytes_each=captures_max_bytes_each,
        captures_min_free_bytes=captures_min_free,
        interval_seconds=interval,
        embedded=embedded,
        demo=demo,
    )
    from torchperfd_daemon.server import AlreadyServedError, Daemon

    async def serve() -> None:
        await Daemon(settings).run()

    try:
        asyncio.run(serve())
    except AlreadyServedError:
        # Two ranks may start an embedded daemon at once: one of them is enough.
        if not embedded:
            raise


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{text!r} is no HOST:PORT", "write it like 127.0.0.1:9407")
    return host.strip("[]"), int(port)


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise UsageError(f"{text!r} is no file mode", "write it like 600 or 666")
    return mode
