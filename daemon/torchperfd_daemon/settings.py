"""What ``torchperfd serve`` was told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of one daemon.

    Attributes:
        socket: Path of the unix socket for clients and the command line.
        socket_mode: Its permission bits.
        metrics_host: Address the metrics page listens on; loopback by default.
        metrics_port: Its port; 0 for any free one.
        captures_dir: Where traces are kept.
        web_config_file: TLS and basic auth of the metrics page, in the exporters' format; None for neither.
        interval_seconds: Time between two samples of the node.
        embedded: Owned by one run: stop once standard input is closed and no rank is left,
            and do without what another daemon already has.
        drain_seconds: How long SIGTERM waits for work in progress.
        grace_seconds: How long a rank that has left keeps its series.
        demo: Show simulated GPUs in the place of this node's own.
    """

    socket: str
    captures_dir: Path
    socket_mode: int = 0o600
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9407
    web_config_file: Path | None = None
    interval_seconds: float = 1.0
    embedded: bool = False
    drain_seconds: float = 8.0
    grace_seconds: float = 60.0
    demo: bool = False
