"""A configuration file: TOML with the options of ``serve`` and the tables of its triggers."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.config.errors import BadValueError, ConfigError, refuse_unknown, shown
from torchperfd_daemon.config.options import OPTIONS
from torchperfd_daemon.config.trigger_tables import read_plan
from torchperfd_daemon.triggers.rules import Plan

SYSTEM_FILE: Final = Path("/etc/torchperfd/config.toml")
_MAX_BYTES: Final = 1024 * 1024
_TRIGGER_TABLES: Final = ("triggers", "trigger")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read and validated."""

    path: Path
    values: Mapping[str, Any]
    plan: Plan | None


def find_files(chosen: Path | None, system: Path = SYSTEM_FILE) -> list[ConfigFile]:
    """Return the existing files, highest precedence first.

    Args:
        system: Need not exist.

    Raises:
        ConfigError: One of them cannot be used.
    """
    files = [read_file(chosen)] if chosen else []
    return [*files, read_file(system)] if os.path.exists(system) else files  # noqa: PTH110  it never raises


def read_file(path: Path) -> ConfigFile:
    """Read a configuration file.

    Raises:
        ConfigError: It does not exist, is not TOML, or has an unknown key or an invalid value.
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
        # Bounded: a device or a trace named by mistake must end in a message.
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "name a readable file with --config"
        ) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes", "name a TOML file with --config")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not TOML: {shown(reason)[1:-1]}", "correct it") from None
