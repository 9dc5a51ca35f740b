"""What ``torchperfd serve`` is told: flag > environment > --config FILE > system file > default.

Each option is one entry of ``OPTIONS``; its flag, its variable, its key in a file and its help
all follow from that.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.v1 import contract
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.settings import ServeSettings
from torchperfd_daemon.triggers.rules import Plan, read_plan
from torchperfd_daemon.values import (
    Address,
    BadValueError,
    Choice,
    Count,
    File,
    Kind,
    Mode,
    Number,
    Size,
    Span,
    Switch,
    Text,
    refuse_unknown,
    shown,
)

SYSTEM_FILE: Final = Path("/etc/torchperfd/config.toml")
VARIABLES: Final = "TORCHPERFD_"
DEFAULT: Final = "default"
_MOST_BYTES: Final = 1024 * 1024
_TRIGGER_TABLES: Final = ("triggers", "trigger")


class ConfigError(UsageError):
    """The configuration cannot be used; the message names the file or variable, and the key."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``serve``.

    Attributes:
        key: Its name in a file; the flag has dashes for its underscores, the variable is in capitals.
        kind: What its values are.
        help: One sentence.
        default: As it would stand in a file; a callable finds it out when it is needed; None is no value.
        fields: Of ServeSettings; the key when empty. Several take the parts of a value.
        flag: When it is not made of the key.
        flag_only: It makes no sense in a file or a variable, and is not shown.
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
        """Its flag."""
        return self.flag or f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{VARIABLES}{self.key.upper()}"

    def default_value(self) -> Any:
        """Return the value without any other; None for none."""
        raw = self.default() if callable(self.default) else self.default
        return None if raw is None else self.kind.read(raw, Path())


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
        "Analyse each capture once it has ended, when the node has nothing else to do.",
        True,
    ),
    Option(
        "captures_upload",
        Text(),
        "Where to upload captures, like s3://bucket/prefix; what has not been yet, the limits above spare.",
    ),
    Option(
        "fleet_address",
        Address(),
        "HOST:PORT where daemons of other nodes may ask; beyond 127.0.0.1 only with a token or TLS.",
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
    Option("fleet_tls_ca", File(), "Authority whose certificates daemons of the fleet show."),
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
)
"""All options of ``serve``, in the order of its help."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value in force, and who has said so: a flag, a variable, a file, or nobody."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """All that is in force.

    Attributes:
        settings: By the options' keys.
        plan: The triggers.
        plan_origin: The file that they come from.
    """

    settings: Mapping[str, Setting]
    plan: Plan
    plan_origin: str

    def serve_settings(self) -> ServeSettings:
        """Return what the daemon takes."""
        fields: dict[str, Any] = {}
        for option in OPTIONS:
            value = self.settings[option.key].value
            if len(option.fields) > 1:
                fields.update(zip(option.fields, value, strict=True))
            else:
                fields[option.fields[0] if option.fields else option.key] = value
        return ServeSettings(**{**fields, "socket": str(fields["socket"])})


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read and has nothing unknown or wrong in it."""

    path: Path
    values: Mapping[str, Any]
    plan: Plan | None


def resolve(
    flags: Mapping[str, Any],
    files: Sequence[ConfigFile],
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return what is in force.

    Args:
        flags: Values of the flags that were given, by the options' keys.
        files: The strongest first. The triggers are those of the first that has some.
        environ: The environment; an empty variable counts as none.

    Raises:
        ConfigError: A variable's value makes no sense.
    """
    settings = {}
    for option in OPTIONS:
        settings[option.key] = _setting(option, flags, files, environ)
    planned = next((file for file in files if file.plan is not None), None)
    if planned is None or planned.plan is None:
        return Config(settings, Plan(), DEFAULT)
    return Config(settings, planned.plan, str(planned.path))


def _setting(
    option: Option, flags: Mapping[str, Any], files: Sequence[ConfigFile], environ: Mapping[str, str]
) -> Setting:
    if option.key in flags:
        return Setting(flags[option.key], option.name)
    text = environ.get(option.variable)
    if text and not option.flag_only:
        try:
            return Setting(option.kind.parse(text, Path()), option.variable)
        except BadValueError as error:
            raise ConfigError(f"{option.variable}: {error.problem}", error.remedy) from None
    for file in files:
        if option.key in file.values:
            return Setting(file.values[option.key], str(file.path))
    return Setting(option.default_value(), DEFAULT)


def find_files(chosen: Path | None, system: Path = SYSTEM_FILE) -> list[ConfigFile]:
    """Return the files that there are, the strongest first.

    Args:
        chosen: What ``--config`` names.
        system: Need not exist.

    Raises:
        ConfigError: One of them cannot be used.
    """
    files = [read_file(chosen)] if chosen else []
    return [*files, read_file(system)] if os.path.exists(system) else files  # noqa: PTH110  it never raises


def read_file(path: Path) -> ConfigFile:
    """Read a configuration file.

    Raises:
        ConfigError: It is not there, is no TOML, or has a key or a value that makes no sense.
    """
    table = _parse(path)
    known = {option.key: option for option in OPTIONS if not option.flag_only}
    try:
        refuse_unknown(table, (*known, *_TRIGGER_TABLES), str(path))
        plan = None
        if any(name in table for name in _TRIGGER_TABLES):
            plan = read_plan(table.get("triggers", {}), table.get("trigger", []), str(path))
    except BadValueError as error:
        raise ConfigError(error.problem, error.remedy) from None
    values = {}
    for key, option in known.items():
        if key not in table:
            continue
        try:
            values[key] = option.kind.read(table[key], path.absolute().parent)
        except BadValueError as error:
            raise ConfigError(f"{path}: {key}: {error.problem}", error.remedy) from None
    return ConfigFile(path, values, plan)


def _parse(path: Path) -> dict[str, Any]:
    try:
        # Never more than a little of it: whoever names a device or a trace by mistake gets an answer.
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "name a readable file with --config"
        ) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes", "name a TOML file with --config")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no TOML: {shown(reason)[1:-1]}", "correct it") from None
