"""The configuration in force: flag > environment > --config FILE > system file > default.

A configuration file is TOML with the options of ``serve``, and the tables ``[triggers]`` and ``[[trigger]]``.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.config.kinds import (
    Choice,
    Count,
    Counts,
    Kind,
    Labels,
    Name,
    Number,
    Span,
    Switch,
    Text,
)
from torchperfd_daemon.config.options import OPTIONS, Option, ServeSettings
from torchperfd_daemon.errors import BadValueError, ConfigError, refuse_unknown, shown_value
from torchperfd_daemon.triggers.plan import PER_DAY, SEVERE_XIDS, Action, Plan, Rule, Schedule, When

_MAX_TRIGGERS: Final = 100
_RESERVED_NAMES: Final = ("command", "script", "automatic")  # the other sources of captures
_METRIC_NAME: Final = re.compile(r"torchperfd_[a-z0-9_]{1,80}")
_RULE_KEYS: Final[Mapping[str, Kind]] = {
    "name": Name(_RESERVED_NAMES),
    "when": Choice(tuple(when.value for when in When)),
    "action": Choice(tuple(action.value for action in Action)),
    "cooldown": Span(1, 30 * 86400),
    "per_day": Count(0, 100_000),
}
_CAPTURE_KEYS: Final[Mapping[str, Kind]] = {
    "steps": Count(1, 1000),
    "record_shapes": Switch(),
    "with_stack": Switch(),
    "profile_memory": Switch(),
}
_RATIO: Final = Number(0.01, 100)
_SHARE: Final = Number(0.01, 1)
_HOLD: Final = Span(0, 3600)
_VALUE: Final = Number(-1e18, 1e18)
_CONDITION_KEYS: Final[Mapping[When, Mapping[str, Kind]]] = {
    When.STEP_TIME_REGRESSION: {"above": _RATIO, "for": _HOLD},
    When.STRAGGLER: {"above": _RATIO, "for": _HOLD},
    When.GPU_UTILISATION_DROP: {"below": _SHARE, "for": _HOLD},
    When.STALL: {"for": Span(1, 86400)},
    When.XID: {"xids": Counts()},
    When.GPU_MEMORY_NEAR_FULL: {"above": _SHARE, "for": _HOLD},
    When.METRIC: {"metric": Text(), "labels": Labels(), "above": _VALUE, "below": _VALUE, "for": _HOLD},
}
_CONDITION_DEFAULTS: Final[Mapping[When, Mapping[str, Any]]] = {
    When.STEP_TIME_REGRESSION: {"above": 0.2, "for": 5.0},
    When.STRAGGLER: {"above": 0.2, "for": 10.0},
    When.GPU_UTILISATION_DROP: {"below": 0.5, "for": 5.0},
    When.STALL: {"for": 10.0, "action": Action.STACKS.value},
    When.XID: {},
    When.GPU_MEMORY_NEAR_FULL: {"above": 0.95, "for": 5.0},
    When.METRIC: {},
}
_SCHEDULE_KEYS: Final[Mapping[str, Kind]] = {
    "name": Name(_RESERVED_NAMES),
    "every": Span(10, 30 * 86400),
    "overhead": Number(1e-6, 1),
}


def read_plan(triggers: object, tables: object, where: str) -> Plan:
    """Read the table ``[triggers]`` and the tables ``[[trigger]]`` of a configuration.

    Args:
        where: The file, for messages.

    Raises:
        BadValueError: A table, key or value is invalid.
    """
    if not isinstance(triggers, dict):
        raise BadValueError(f"{where}: triggers is no table", "write it as [triggers]")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadValueError(f"{where}: trigger is no list of tables", "write each as [[trigger]]")
    if len(tables) > _MAX_TRIGGERS:
        raise BadValueError(f"{where}: there are {len(tables):,} triggers", f"write up to {_MAX_TRIGGERS}")
    shared = _read_values(triggers, {"per_day": Count(0, 100_000)}, f"{where}: triggers")
    rules, schedules = list[Rule](), list[Schedule]()
    names = set[str]()
    for number, table in enumerate(tables, start=1):
        place = f"{where}: trigger {number}"
        read = _read_schedule(table, place) if "every" in table else _read_rule(table, place)
        if read.name in names:
            raise BadValueError(f"{place}: there are two of the name {read.name}", "rename one of them")
        names.add(read.name)
        if isinstance(read, Rule):
            rules.append(read)
        else:
            schedules.append(read)
    return Plan(tuple(rules), tuple(schedules), shared.get("per_day", PER_DAY))


def _read_schedule(table: Mapping[str, object], where: str) -> Schedule:
    values = _read_values(table, _SCHEDULE_KEYS, where)
    return Schedule(values.get("name", "glance"), values["every"], values.get("overhead", 0.001))


def _read_rule(table: Mapping[str, object], where: str) -> Rule:
    if "when" not in table:
        refuse_unknown(table, (*_RULE_KEYS, "every"), where)
        raise BadValueError(
            f"{where}: neither when nor every is set", 'write when = "stall", or every = "10m"'
        )
    when = When(_read_value(table, "when", _RULE_KEYS["when"], where))
    defaults = _CONDITION_DEFAULTS[when]
    chosen = _read_value(
        {"action": defaults.get("action", "capture"), **table}, "action", _RULE_KEYS["action"], where
    )
    action = Action(chosen)
    of_capture = _CAPTURE_KEYS if action is Action.CAPTURE else {}
    values = {**defaults, **_read_values(table, {**_RULE_KEYS, **_CONDITION_KEYS[when], **of_capture}, where)}
    if when is When.METRIC:
        _check_metric(values, where)
    return Rule(
        name=values.get("name", when.value),
        when=when,
        action=action,
        above=values.get("above"),
        below=values.get("below"),
        hold_seconds=values.get("for", 0.0),
        metric=values.get("metric", ""),
        labels=values.get("labels", ()),
        xids=values.get("xids", SEVERE_XIDS),
        options=CaptureOptions(**{name: values[name] for name in of_capture if name in values}),
        cooldown_seconds=values.get("cooldown", 1800.0),
        per_day=values.get("per_day", 10),
    )


def _check_metric(values: Mapping[str, Any], where: str) -> None:
    name = values.get("metric", "")
    if not _METRIC_NAME.fullmatch(name):
        raise BadValueError(
            f"{where}: metric: {shown_value(name)} is no metric of ours",
            "name one that the metrics page shows",
        )
    if ("above" in values) == ("below" in values):
        raise BadValueError(f"{where}: a metric has one bound", "set either above or below")


def _read_values(table: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    refuse_unknown(table, kinds, where)
    return {key: _read_value(table, key, kinds[key], where) for key in table}


def _read_value(table: Mapping[str, object], key: str, kind: Kind, where: str) -> Any:
    try:
        return kind.read(table[key], Path())
    except BadValueError as error:
        raise BadValueError(f"{where}: {key}: {error.problem}", error.remedy) from None


def as_tables(plan: Plan) -> list[dict[str, Any]]:
    """Return all triggers as ``read_plan`` takes them, with every value said."""
    return [*map(_rule_table, plan.rules), *map(_schedule_table, plan.schedules)]


def _rule_table(rule: Rule) -> dict[str, Any]:
    of_capture = _CAPTURE_KEYS if rule.action is Action.CAPTURE else {}
    said = {
        "name": rule.name,
        "when": rule.when.value,
        "action": rule.action.value,
        "above": rule.above,
        "below": rule.below,
        "for": rule.hold_seconds,
        "metric": rule.metric,
        "labels": rule.labels,
        "xids": rule.xids,
        "cooldown": rule.cooldown_seconds,
        "per_day": rule.per_day,
        **{key: getattr(rule.options, key) for key in of_capture},
    }
    kinds = {**_RULE_KEYS, **_CONDITION_KEYS[rule.when], **of_capture}
    return {key: kinds[key].show(value) for key, value in said.items() if key in kinds and value is not None}


def _schedule_table(schedule: Schedule) -> dict[str, Any]:
    said = {"name": schedule.name, "every": schedule.every_seconds, "overhead": schedule.overhead}
    return {key: _SCHEDULE_KEYS[key].show(value) for key, value in said.items()}


SYSTEM_FILE: Final = Path("/etc/torchperfd/config.toml")
_MAX_FILE_BYTES: Final = 1024 * 1024
_MAX_REASON_LENGTH: Final = 120
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
    table = _parse_toml(path)
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


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        # Bounded: a device or a trace named by mistake must end in a message.
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "name a readable file with --config"
        ) from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES:,} bytes", "name a TOML file with --config")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # tomllib writes out what it found as Python does, so without control characters.
        reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
        raise ConfigError(f"{path} is not TOML: {reason}", "correct it") from None


DEFAULT_ORIGIN: Final = "default"


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
        return Config(settings, Plan(), DEFAULT_ORIGIN)
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
    return Setting(option.default_value(), DEFAULT_ORIGIN)
