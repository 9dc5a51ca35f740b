"""Settings of ``torchperfd serve``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of one daemon.

    Attributes:
        socket: Path of the unix socket for clients and the command line.
        socket_mode: Its permission bits.
        admin_group: Group whose members have the rights of every run's owner; None for none.
        max_sessions: Training processes at the same time, of all users; as many ranks are kept.
        max_sessions_per_user: Of one user.
        metrics_host: Address the metrics page listens on; loopback by default.
        metrics_port: Its port; 0 for any free one.
        captures_dir: Where traces are kept.
        captures_max_bytes: Of all captures on the disk; the oldest go. 0 is no limit, here and below.
        captures_max_age_seconds: Since a capture was asked for; older ones go.
        captures_max_count: How many captures; the oldest go.
        captures_max_bytes_each: Of the traces of one capture.
        captures_min_free_bytes: With less free on the disk, no capture is begun.
        analyze_captures: Have each capture analysed once it has ended; an embedded daemon never does.
        captures_upload: URL that captures are uploaded to; None for none.
        web_config_file: TLS and basic auth of the metrics page, in the exporters' format; None for neither.
        fleet_address: Host and port for daemons of other nodes; None for no port.
        fleet_peers: Which daemons there are; see ``fleet.peers``. None for no others.
        fleet_token_file: File of the secret that daemons share.
        fleet_tls_cert: Certificate that this daemon shows to others, in PEM, like the two below.
        fleet_tls_key: Its key.
        fleet_tls_ca: The certificate authority that is trusted.
        interval_seconds: Time between two samples of the node.
        embedded: Owned by one run: stop once standard input is closed and no rank is left,
            and do without what another daemon already has.
        drain_seconds: How long SIGTERM waits for work in progress.
        grace_seconds: How long a rank that has left keeps its series.
        demo: Show simulated GPUs instead of this node's own.
        log_level: What to log; a name of logging's, in lower case.
    """

    socket: str
    captures_dir: Path
    captures_max_bytes: int = 20 * 2**30
    captures_max_age_seconds: float = 0.0
    captures_max_count: int = 10_000
    captures_max_bytes_each: int = 4 * 2**30
    captures_min_free_bytes: int = 2**30
    analyze_captures: bool = True
    captures_upload: str | None = None
    socket_mode: int = 0o600
    admin_group: str | None = None
    max_sessions: int = 2048
    max_sessions_per_user: int = 512
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9407
    web_config_file: Path | None = None
    fleet_address: tuple[str, int] | None = None
    fleet_peers: str | None = None
    fleet_token_file: Path | None = None
    fleet_tls_cert: Path | None = None
    fleet_tls_key: Path | None = None
    fleet_tls_ca: Path | None = None
    interval_seconds: float = 1.0
    embedded: bool = False
    drain_seconds: float = 8.0
    grace_seconds: float = 60.0
    demo: bool = False
    log_level: str = "info"
