"""The tables ``[triggers]`` and ``[[trigger]]`` of a configuration file, as a plan and back."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.config.errors import BadValueError, refuse_unknown, shown
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
from torchperfd_daemon.triggers.rules import PER_DAY, SEVERE_XIDS, Action, Plan, Rule, Schedule, When

_MAX_TRIGGERS: Final = 100
_RESERVED: Final = ("command", "script", "automatic")  # the other sources of captures
_METRIC: Final = re.compile(r"torchperfd_[a-z0-9_]{1,80}")
_COMMON: Final[Mapping[str, Kind]] = {
    "name": Name(_RESERVED),
    "when": Choice(tuple(when.value for when in When)),
    "action": Choice(tuple(action.value for action in Action)),
    "cooldown": Span(1, 30 * 86400),
    "per_day": Count(0, 100_000),
}
_CAPTURE: Final[Mapping[str, Kind]] = {
    "steps": Count(1, 1000),
    "record_shapes": Switch(),
    "with_stack": Switch(),
    "profile_memory": Switch(),
}
_RATIO: Final = Number(0.01, 100)
_SHARE: Final = Number(0.01, 1)
_HOLD: Final = Span(0, 3600)
_VALUE: Final = Number(-1e18, 1e18)
_OF: Final[Mapping[When, Mapping[str, Kind]]] = {
    When.STEP_TIME_REGRESSION: {"above": _RATIO, "for": _HOLD},
    When.STRAGGLER: {"above": _RATIO, "for": _HOLD},
    When.GPU_UTILISATION_DROP: {"below": _SHARE, "for": _HOLD},
    When.STALL: {"for": Span(1, 86400)},
    When.XID: {"xids": Counts()},
    When.GPU_MEMORY_NEAR_FULL: {"above": _SHARE, "for": _HOLD},
    When.METRIC: {"metric": Text(), "labels": Labels(), "above": _VALUE, "below": _VALUE, "for": _HOLD},
}
_DEFAULTS: Final[Mapping[When, Mapping[str, Any]]] = {
    When.STEP_TIME_REGRESSION: {"above": 0.2, "for": 5.0},
    When.STRAGGLER: {"above": 0.2, "for": 10.0},
    When.GPU_UTILISATION_DROP: {"below": 0.5, "for": 5.0},
    When.STALL: {"for": 10.0, "action": Action.STACKS.value},
    When.XID: {},
    When.GPU_MEMORY_NEAR_FULL: {"above": 0.95, "for": 5.0},
    When.METRIC: {},
}
_SCHEDULE: Final[Mapping[str, Kind]] = {
    "name": Name(_RESERVED),
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
    shared = _values(triggers, {"per_day": Count(0, 100_000)}, f"{where}: triggers")
    rules, schedules = list[Rule](), list[Schedule]()
    names = set[str]()
    for number, table in enumerate(tables, start=1):
        place = f"{where}: trigger {number}"
        read = _schedule(table, place) if "every" in table else _rule(table, place)
        if read.name in names:
            raise BadValueError(f"{place}: there are two of the name {read.name}", "rename one of them")
        names.add(read.name)
        if isinstance(read, Rule):
            rules.append(read)
        else:
            schedules.append(read)
    return Plan(tuple(rules), tuple(schedules), shared.get("per_day", PER_DAY))


def _schedule(table: Mapping[str, object], where: str) -> Schedule:
    values = _values(table, _SCHEDULE, where)
    return Schedule(values.get("name", "glance"), values["every"], values.get("overhead", 0.001))


def _rule(table: Mapping[str, object], where: str) -> Rule:
    if "when" not in table:
        refuse_unknown(table, (*_COMMON, "every"), where)
        raise BadValueError(
            f"{where}: neither when nor every is set", 'write when = "stall", or every = "10m"'
        )
    when = When(_value(table, "when", _COMMON["when"], where))
    defaults = _DEFAULTS[when]
    chosen = _value(
        {"action": defaults.get("action", "capture"), **table}, "action", _COMMON["action"], where
    )
    action = Action(chosen)
    of_capture = _CAPTURE if action is Action.CAPTURE else {}
    values = {**defaults, **_values(table, {**_COMMON, **_OF[when], **of_capture}, where)}
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
    if not _METRIC.fullmatch(name):
        raise BadValueError(
            f"{where}: metric: {shown(name)} is no metric of ours", "name one that the metrics page shows"
        )
    if ("above" in values) == ("below" in values):
        raise BadValueError(f"{where}: a metric has one bound", "set either above or below")


def _values(table: Mapping[str, object], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    refuse_unknown(table, kinds, where)
    return {key: _value(table, key, kinds[key], where) for key in table}


def _value(table: Mapping[str, object], key: str, kind: Kind, where: str) -> Any:
    try:
        return kind.read(table[key], Path())
    except BadValueError as error:
        raise BadValueError(f"{where}: {key}: {error.problem}", error.remedy) from None


def as_tables(plan: Plan) -> list[dict[str, Any]]:
    """Return all triggers as ``read_plan`` takes them, with every value said."""
    return [*map(_rule_table, plan.rules), *map(_schedule_table, plan.schedules)]


def _rule_table(rule: Rule) -> dict[str, Any]:
    of_capture = _CAPTURE if rule.action is Action.CAPTURE else {}
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
    kinds = {**_COMMON, **_OF[rule.when], **of_capture}
    return {key: kinds[key].show(value) for key, value in said.items() if key in kinds and value is not None}


def _schedule_table(schedule: Schedule) -> dict[str, Any]:
    said = {"name": schedule.name, "every": schedule.every_seconds, "overhead": schedule.overhead}
    return {key: _SCHEDULE[key].show(value) for key, value in said.items()}
