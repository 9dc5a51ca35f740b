"""The configuration in force: flag > environment > --config FILE > system file > default."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.config.errors import BadValueError, ConfigError
from torchperfd_daemon.config.file import ConfigFile
from torchperfd_daemon.config.options import OPTIONS, Option
from torchperfd_daemon.config.settings import ServeSettings
from torchperfd_daemon.triggers.rules import Plan

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value in force and its origin: a flag, a variable, a file, or ``default``."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration in force.

    Attributes:
        settings: By the options' keys.
        plan_origin: The file that they come from, or ``default``.
    """

    settings: Mapping[str, Setting]
    plan: Plan
    plan_origin: str

    def serve_settings(self) -> ServeSettings:
        """Return the settings that the daemon takes."""
        fields: dict[str, Any] = {}
        for option in OPTIONS:
            value = self.settings[option.key].value
            if len(option.fields) > 1:
                fields.update(zip(option.fields, value, strict=True))
            else:
                fields[option.fields[0] if option.fields else option.key] = value
        return ServeSettings(**{**fields, "socket": str(fields["socket"])})


def resolve(
    flags: Mapping[str, Any],
    files: Sequence[ConfigFile],
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration in force.

    Args:
        flags: Values of the flags that were given, by the options' keys.
        files: The strongest first. The triggers are those of the first that has some.
        environ: The environment; an empty variable counts as none.

    Raises:
        ConfigError: The value of a variable is not valid.
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
