"""Narrows the queries of dashboards and rules to the series with some labels, such as one cluster's."""

import json
import re
from typing import Any, Final

import click

_MATCHERS: Final = re.compile(
    r"""\s*[a-zA-Z_]\w*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"\s*(?:,\s*(?=[a-zA-Z_])|$)""", re.ASCII
)
# Series of recording rules have a colon in their names, and no labels besides those that they are grouped by.
_SERIES: Final = re.compile(r"(?<![\w:])(torchperfd_\w+|up(?=\{))(?![\w:])(\{)?", re.ASCII)
_QUERIES: Final = ("expr", "query", "definition")
_EXPRESSION: Final = re.compile(r"^(?P<indent> *)expr: \|\n(?P<lines>(?:(?P=indent) +.*\n)+)", re.MULTILINE)


class Selector(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """Matchers of labels, as PromQL has them between braces."""

    name = "selector"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the matchers.

        Raises:
            click.BadParameter: They are none.
        """
        text = str(value).strip()
        position = 0
        while position < len(text) or not text:
            match = _MATCHERS.match(text, position)
            if match is None:
                self.fail(f'{text[:80]!r} has no matchers such as cluster="one"', param, ctx)
            position = match.end()
        return text


def narrow_query(query: str, selector: str) -> str:
    """Return a query in PromQL, in which all metrics of torchperfd and of its scrapes have the matchers."""
    return _SERIES.sub(lambda found: f"{found[1]}{{{selector}{',' if found[2] else '}'}", query)


def narrow_dashboard(text: str, selector: str) -> str:
    """Return the file of a dashboard with narrowed queries."""
    return json.dumps(_narrowed(json.loads(text), selector), indent=2, sort_keys=True) + "\n"


def narrow_rules(text: str, selector: str) -> str:
    """Return the file of rules with narrowed expressions."""

    def narrowed(found: re.Match[str]) -> str:
        return f"{found['indent']}expr: |\n{narrow_query(found['lines'], selector)}"

    return _EXPRESSION.sub(narrowed, text)


def _narrowed(part: Any, selector: str) -> Any:
    if isinstance(part, dict):
        return {
            name: narrow_query(value, selector)
            if name in _QUERIES and isinstance(value, str)
            else _narrowed(value, selector)
            for name, value in part.items()
        }
    return [_narrowed(each, selector) for each in part] if isinstance(part, list) else part
