"""The environment variables that torchperfd reads, and which of those that are set it does not know."""

import difflib
import re
from collections.abc import Mapping
from typing import Final

PREFIX: Final = "TORCHPERFD_"

_SERVE: Final = (
    *("socket", "socket_mode", "admin_group", "max_sessions", "max_sessions_per_user"),
    *("metrics_address", "web_config_file", "user_label", "collectors", "metrics_level", "page_hosts"),
    *("otlp", "otlp_interval", "kubernetes_events"),
    *("captures_dir", "captures_max_bytes", "captures_max_age", "captures_max_count"),
    *("captures_max_bytes_each", "captures_min_free", "analyze_captures", "captures_upload"),
    *("lake", "lake_cluster"),
    *("fleet_address", "fleet_peers", "fleet_token_file", "fleet_tls_cert", "fleet_tls_key", "fleet_tls_ca"),
    *("prometheus", "prometheus_secret_file", "prometheus_ca_file", "prometheus_tenant"),
    *("interval", "demo", "log_level", "log_format"),
)
"""Options of ``torchperfd serve``; training processes have the same environment."""

VARIABLES: Final = frozenset(
    (
        *(f"{PREFIX}{key.upper()}" for key in _SERVE),
        "TORCHPERFD_CONFIG",
        "TORCHPERFD_JOB",
        "TORCHPERFD_NO_ADVISE",
        "TORCHPERFD_RUN",
        "TORCHPERFD_RUNS_DIR",
        "TORCHPERFD_SERVICE_USER",
        "TORCHPERFD_STACK_SIGNAL",
        # Of this repository's build, tools and tests.
        "TORCHPERFD_PROTO_VENV",
        "TORCHPERFD_REQUIRE_NATIVE",
        "TORCHPERFD_REWRITE_GOLDEN",
    )
)
"""All variables with the prefix that any part of torchperfd reads."""

_MIN_ALIKE: Final = 0.6
_MAX_COMPARED: Final = 80
_TESTS: Final = "TORCHPERFD_TEST_"
_OF_KUBERNETES: Final = re.compile(
    r"TORCHPERFD_(?:.*_)?(?:SERVICE_(?:HOST|PORT(?:_.+)?)|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
"""Kubernetes sets these in each pod beside a Service whose name begins with ``torchperfd``."""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables with the prefix that no part of torchperfd reads."""
    return [
        name
        for name in sorted(environ)
        if name.startswith(PREFIX)
        and name not in VARIABLES
        and not name.startswith(_TESTS)
        and not _OF_KUBERNETES.fullmatch(name)
    ]


def unknown_text(environ: Mapping[str, str]) -> str:
    """Return which variables are not known, in one line; empty where all are.

    For example ``TORCHPERFD_SOKET is unknown; did you mean TORCHPERFD_SOCKET?``.
    """
    return "; ".join(f"{name} is unknown{_meant(name)}" for name in unknown_variables(environ))


def known_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for commands that torchperfd itself starts, which no misspelt variable ends."""
    unknown = frozenset(unknown_variables(environ))
    return {name: value for name, value in environ.items() if name not in unknown}


def _meant(name: str) -> str:
    """Return the question after the nearest name that there is; empty if none is near."""
    # Without the prefix, which would make all names alike.
    known = [each.removeprefix(PREFIX) for each in VARIABLES]
    given = name.removeprefix(PREFIX)[:_MAX_COMPARED].upper()
    near = difflib.get_close_matches(given, known, 1, _MIN_ALIKE)
    return f"; did you mean {PREFIX}{near[0]}?" if near else ""
