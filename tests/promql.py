"""Takes the queries out of a Grafana dashboard in a form that a bare Prometheus executes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_LABEL_VALUES: Final = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)")
_VARIABLE: Final = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<bare>\w+))")


@dataclass(frozen=True, slots=True)
class Query:
    """One query, by the panel or variable that asks it."""

    name: str
    expr: str
    may_be_empty: bool


def queries(
    dashboard: dict[str, Any],
    *,
    run: str,
    rank: str = ".*",
    instance: str = ".*",
    rate_interval: str = "15s",
    time_range: str = "60s",
) -> list[Query]:
    """List every panel's and variable's query, with Grafana's variables and macros filled in.

    `run` is a value. `rank`, `instance` and the GPU are regular expressions where the dashboard lets
    several be chosen, values elsewhere. A query of a variable returns one series per value. A panel may be
    without data only when its description says "Empty ...".
    """
    values = {
        "run": _quoted(run),
        "rank": _quoted(rank),
        "instance": _quoted(instance),
        "gpu": ".*",
        "top": "12",
        "datasource": "prometheus",
        "__rate_interval": rate_interval,
        "__range": time_range,
        "__range_s": time_range.removesuffix("s"),
    }
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            expr = filled(_values_of_label(variable["query"]), values)
            # A node without GPUs has no GPU to choose.
            found.append(Query(f"variable {variable['name']}", expr, "torchperfd_gpu_" in expr))
    for panel in panels(dashboard):
        may_be_empty = "Empty " in panel["description"]
        for target in panel["targets"]:
            name = f"{panel['title']} ({target['refId']})"
            found.append(Query(name, filled(target["expr"], values), may_be_empty))
    return found


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Walk the panels that draw something, also those inside collapsed rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _values_of_label(query: str) -> str:
    match = _LABEL_VALUES.fullmatch(query)
    if match is None:
        raise ValueError(f"not a label_values() query: {query}")
    selector, label = match["selector"], match["label"]
    metric, brace, matchers = selector.partition("{")
    inside = f"{matchers.removesuffix('}')}," if brace else ""
    # Grafana lists no empty value, so a series without the label must not count as one.
    return f'group by ({label}) ({metric}{{{inside}{label}!=""}})'


def filled(expr: str, values: dict[str, str]) -> str:
    """Fill variables and macros into an expression.

    Raises:
        ValueError: A variable has no value.
    """

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        if name not in values:
            raise ValueError(f"unknown variable ${name} in: {expr}")
        return values[name]

    return _VARIABLE.sub(value, expr)
