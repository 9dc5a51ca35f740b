"""The options of ``torchperfd serve``, and the settings that the daemon takes.

Each option is one entry of ``OPTIONS``. Its flag, variable, key in a file and help text follow from it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.v1 import contract
from torchperfd_daemon.config.kinds import (
    ALL,
    Address,
    Choice,
    Choices,
    Count,
    File,
    Kind,
    Mode,
    Number,
    Size,
    Span,
    Switch,
    Text,
)

COLLECTORS: Final = (
    "cpu", "memory", "disk", "network", "pressure", "process", "gpu", "owners",
    "steps", "diagnosis", "goodput", "captures", "self",
)  # fmt: skip
"""What the daemon samples and exports; docs/metrics.md has the series of each."""

FULL: Final = "full"
ESSENTIAL: Final = "essential"


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
    lake: str | None = None
    lake_cluster: str = "default"
    socket_mode: int = 0o600
    admin_group: str | None = None
    max_sessions: int = 2048
    max_sessions_per_user: int = 512
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9407
    web_config_file: Path | None = None
    user_label: bool = False
    collectors: tuple[str, ...] = COLLECTORS
    metrics_level: str = FULL
    page_hosts: str | None = None
    otlp: str | None = None
    otlp_interval_seconds: float = 60.0
    kubernetes_events: bool = False
    fleet_address: tuple[str, int] | None = None
    fleet_peers: str | None = None
    fleet_token_file: Path | None = None
    fleet_tls_cert: Path | None = None
    fleet_tls_key: Path | None = None
    fleet_tls_ca: Path | None = None
    prometheus: str | None = None
    prometheus_secret_file: Path | None = None
    prometheus_ca_file: Path | None = None
    prometheus_tenant: str | None = None
    interval_seconds: float = 1.0
    embedded: bool = False
    drain_seconds: float = 8.0
    grace_seconds: float = 60.0
    demo: bool = False
    log_level: str = "info"
    log_format: str = "text"

    @property
    def is_service(self) -> bool:
        """Whether other users may connect; then captures lie in a directory of the daemon's alone."""
        return not self.embedded and bool(self.socket_mode & 0o066)


VARIABLES: Final = "TORCHPERFD_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``serve``.

    Attributes:
        key: Its name in a file; the flag has dashes for its underscores, the variable is in capitals.
        default: As written in a file; a callable computes it when it is needed; None is no value.
        fields: Of ServeSettings; the key when empty. Several take the parts of a value.
        flag: When it is not made of the key.
        flag_only: It is neither read from files and variables nor shown.
    """

    key: str
    kind: Kind
    help: str
    default: object = None
    fields: tuple[str, ...] = ()
    flag: str = ""
    flag_only: bool = False

    @property
    def name(self) -> str:
        return self.flag or f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{VARIABLES}{self.key.upper()}"

    def default_value(self) -> Any:
        """Return the value without any other; None for none."""
        raw = self.default() if callable(self.default) else self.default
        return None if raw is None else self.kind.read(raw, Path())


def cluster_name() -> str:
    """Return the name of the cluster that Slurm gives in a job; ``default`` elsewhere."""
    return os.environ.get("SLURM_CLUSTER_NAME") or "default"


OPTIONS: Final = (
    Option("socket", File(), "Unix socket for clients; this user's own by default.", contract.user_socket),
    Option("socket_mode", Mode(), "Permissions of the socket, octal.", "600"),
    Option(
        "admin_group",
        Text(),
        "Group, by name or id, whose members may command all runs; others only their own.",
    ),
    Option("max_sessions", Count(1, 65536), "Training processes at the same time, of all users.", 2048),
    Option("max_sessions_per_user", Count(1, 65536), "Training processes of one user.", 512),
    Option(
        "metrics_address",
        Address(),
        "HOST:PORT of the metrics page; port 0 takes any free one.",
        "127.0.0.1:9407",
        ("metrics_host", "metrics_port"),
    ),
    Option(
        "web_config_file",
        File(),
        "TLS and basic auth of the metrics page, in the format of Prometheus exporters.",
        flag="--web.config.file",
    ),
    Option(
        "user_label",
        Switch(),
        "Name each rank's user on the metrics page, to all who can reach it.",
        False,
    ),
    Option(
        "collectors",
        Choices(COLLECTORS),
        "What to sample and to export; docs/metrics.md has the series of each name.",
        ALL,
    ),
    Option(
        "metrics_level",
        Choice((FULL, ESSENTIAL)),
        "essential: of each rank only what alerts and rules read, for nodes with many ranks.",
        FULL,
    ),
    Option(
        "page_hosts",
        Text(),
        "Further host names of the live page, with commas; loopback and this node's name are known.",
    ),
    Option(
        "otlp",
        Text(),
        "Send metrics over OTLP to this URL (http://localhost:4318); env takes OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
    Option(
        "otlp_interval",
        Number(1, 3600, "time in seconds"),
        "Seconds between two messages of OTLP.",
        60.0,
        ("otlp_interval_seconds",),
    ),
    Option(
        "kubernetes_events",
        Switch(),
        "Write an Event on a pod once a verdict on its run has stood for ten minutes.",
        False,
    ),
    Option("captures_dir", File(), "Where traces are kept.", contract.user_captures_dir),
    Option(
        "captures_max_bytes",
        Size(),
        "Of all captures on the disk; the oldest are removed beyond. 0 is no limit, here and below.",
        "20GiB",
    ),
    Option(
        "captures_max_age",
        Span(),
        "Remove captures that are older, like 30d.",
        0,
        ("captures_max_age_seconds",),
    ),
    Option("captures_max_count", Count(), "How many captures; the oldest are removed beyond.", 10_000),
    Option(
        "captures_max_bytes_each",
        Size(),
        "Of one capture; its ranks have equal shares, and a larger trace is not kept.",
        "4GiB",
    ),
    Option(
        "captures_min_free",
        Size(),
        "Begin no capture with less free on the disk.",
        "1GiB",
        ("captures_min_free_bytes",),
    ),
    Option(
        "analyze_captures",
        Switch(),
        "Analyse each capture after it has ended, at idle priority.",
        True,
    ),
    Option(
        "captures_upload",
        Text(),
        "Where to upload captures, like s3://bucket/prefix; the limits above spare pending uploads.",
    ),
    Option(
        "lake",
        Text(),
        "Where to append the history of this node, like s3://bucket/prefix; docs/history.md.",
    ),
    Option("lake_cluster", Text(), "Name of this cluster in the lake; Slurm's own by default.", cluster_name),
    Option(
        "fleet_address",
        Address(),
        "HOST:PORT for daemons of other nodes; beyond 127.0.0.1 only with a token or TLS.",
    ),
    Option(
        "fleet_peers",
        Text(),
        "Daemons of other nodes: host:port,..., file:PATH, dns:NAME:PORT, slurm:HOSTLIST:PORT, "
        "slurm:env or job.",
    ),
    Option("fleet_token_file", File(), "A secret of one line that all daemons of the fleet share."),
    Option("fleet_tls_cert", File(), "Certificate of this daemon for others, in PEM."),
    Option("fleet_tls_key", File(), "Its key."),
    Option("fleet_tls_ca", File(), "Certificate authority of the fleet's certificates, in PEM."),
    Option(
        "prometheus",
        Text(),
        "URL of a Prometheus, Thanos, Mimir or VictoriaMetrics: answers questions about all nodes.",
    ),
    Option(
        "prometheus_secret_file",
        File(),
        "A bearer token for it, or the password of the user in its URL.",
    ),
    Option("prometheus_ca_file", File(), "Certificate authority of its certificate, in PEM."),
    Option("prometheus_tenant", Text(), "Its tenant, sent as X-Scope-OrgID."),
    Option(
        "interval",
        Number(0.05, 3600, "time in seconds"),
        "Seconds between two samples of the node.",
        1.0,
        ("interval_seconds",),
    ),
    Option("demo", Switch(), "Show simulated GPUs and ranks, to try things out without any.", False),
    Option("embedded", Switch(), "Stop when standard input closes.", False, flag_only=True),
    Option("log_level", Choice(("debug", "info", "warning", "error")), "What to log.", "info"),
    Option("log_format", Choice(("text", "json")), "Lines of text, or a JSON object in each line.", "text"),
)
"""All options of ``serve``, in the order of its help."""
