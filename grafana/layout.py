"""A dashboard's frame: variables, links to the others, rows open or collapsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana import config
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

Panels = list[Builder[model.Panel]]

FLEET: Final = "torchperfd-fleet"
RUN: Final = "torchperfd-run"
RANK: Final = "torchperfd-rank"
NODE: Final = "torchperfd-node"
DAEMON: Final = "torchperfd-daemon"
TITLES: Final = {FLEET: "Fleet", RUN: "Run", RANK: "Rank", NODE: "Node and GPU", DAEMON: "Daemon"}
"""Every dashboard's uid, which never changes, and its name."""

_TOP: Final = (config.MAX_SERIES // 2, config.MAX_SERIES, config.MAX_SERIES * 4)


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels; a collapsed one queries nothing until it is opened."""

    title: str
    panels: Panels
    collapsed: bool = False


def build(
    uid: str, description: str, variables: Sequence[Builder[model.VariableModel]], rows: Sequence[Row]
) -> model.Dashboard:
    """Put rows below each other, with the data source first among the variables and links on top."""
    builder = (
        dashboard.Dashboard(f"torchperfd: {TITLES[uid]}")
        .uid(uid)
        .description(description)
        .tags(["torchperfd", "pytorch"])
        .time(config.TIME_FROM, "now")
        .refresh(config.REFRESH)
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .links([_link(other, title) for other, title in TITLES.items() if other != uid])
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in variables:
        builder.with_variable(variable)
    for row in rows:
        built = dashboard.Row(row.title)
        if row.collapsed:
            for panel in row.panels:
                built.with_panel(panel)
            builder.with_row(built)
        else:
            builder.with_row(built)
            for panel in row.panels:
                builder.with_panel(panel)
    result = builder.build()
    result.schema_version = config.SCHEMA_VERSION
    _close_gaps(result)
    _number(result)
    return result


def label_values(
    name: str, label: str, metric: str, *, many: bool = False, numeric: bool = False, source: str = ""
) -> dashboard.QueryVariable:
    """Offer the values that a label of `metric` has in the dashboard's time range.

    Args:
        many: Several may be chosen, and all are at first.
        source: The label, where it is not called like the variable.
    """
    query = f"label_values({metric}, {source or name})"
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(config.DATASOURCE)
        .query(query)
        .definition(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NUMERICAL_ASC if numeric else model.VariableSort.ALPHABETICAL_ASC)
        .multi(many)
        .include_all(many)
    )
    if many:
        variable.all_value(".*").current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable


def top() -> dashboard.CustomVariable:
    """Offer how many series a panel of many shows at most."""
    chosen = str(config.MAX_SERIES)
    return (
        dashboard.CustomVariable("top")
        .label("Series per panel")
        .values(",".join(map(str, _TOP)))
        .options([model.VariableOption(selected=str(n) == chosen, text=str(n), value=str(n)) for n in _TOP])
        .current(model.VariableOption(selected=True, text=chosen, value=chosen))
    )


def address(uid: str, **values: str) -> str:
    """Return the address of a dashboard that keeps data source and time range, with variables set."""
    chosen = "".join(f"&var-{name}={value}" for name, value in values.items())
    return f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}"


def _link(uid: str, title: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title)
        .type(model.DashboardLinkType.LINK)
        .url(f"/d/{uid}")
        .icon("dashboard")
        .include_vars(True)
        .keep_time(True)
    )


def _close_gaps(result: model.Dashboard) -> None:
    """Put what follows a collapsed row directly below its title, as Grafana itself saves it."""
    hidden = 0
    for panel in result.panels or []:
        at = panel.grid_pos
        assert at is not None
        at.y -= hidden
        for inner in panel.panels if isinstance(panel, model.RowPanel) else []:
            assert inner.grid_pos is not None
            inner.grid_pos.y -= hidden
        if isinstance(panel, model.RowPanel) and panel.panels:
            places = [inner.grid_pos for inner in panel.panels if inner.grid_pos]
            hidden += max(place.y + place.h for place in places) - at.y - 1


def _number(result: model.Dashboard) -> None:
    """Number all panels, those within collapsed rows as well."""
    number = 0
    for panel in result.panels or []:
        inner = panel.panels if isinstance(panel, model.RowPanel) else []
        for each in (panel, *inner):
            number += 1
            each.id_val = number
