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
        captures_max_bytes: Of all captures on the disk; the oldest go. 0 is no limit, here and below.
        captures_max_age_seconds: Since a capture was asked for; older ones go.
        captures_max_count: How many captures; the oldest go.
        captures_max_bytes_each: Of the traces of one capture.
        captures_min_free_bytes: With less free on the disk, no capture is begun.
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
    captures_max_bytes: int = 20 * 2**30
    captures_max_age_seconds: float = 0.0
    captures_max_count: int = 10_000
    captures_max_bytes_each: int = 4 * 2**30
    captures_min_free_bytes: int = 2**30
    socket_mode: int = 0o600
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9407
    web_config_file: Path | None = None
    interval_seconds: float = 1.0
    embedded: bool = False
    drain_seconds: float = 8.0
    grace_seconds: float = 60.0
    demo: bool = False
