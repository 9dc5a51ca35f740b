"""Settings of ``torchperfd serve``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of one daemon; ``config.options`` describes those that users set.

    Attributes:
        captures_max_age_seconds: 0 is no limit, as in all that follow.
        embedded: Owned by one run: stop once standard input is closed and no rank is left,
            and do without what another daemon already has.
        drain_seconds: How long SIGTERM waits for work in progress.
        grace_seconds: How long a rank that has left keeps its series.
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
    page_hosts: str | None = None
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

    @property
    def is_service(self) -> bool:
        """Whether other users may connect; then captures lie in a directory of the daemon's alone."""
        return not self.embedded and bool(self.socket_mode & 0o066)
