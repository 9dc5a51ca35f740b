"""What panels of the same kind have in common, on top of Grafana's Foundation SDK.

A description that begins a sentence with "Empty ..." names the condition under which the panel has nothing
to draw. Any other panel without data is a defect, and the integration test treats it as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypeVar

from grafana.config import DATASOURCE
from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from grafana_foundation_sdk.models import units

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel, and the name that the legend gives to each of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Column:
    """One query of a table: a value per row.

    Attributes:
        title: Empty for a query that only adds rows and labels, and whose values are not shown.
        red_above: Values from here on are red; None for no colour.
        below: Red is below instead.
    """

    title: str
    expr: str
    unit: str = units.NoUnit
    red_above: float | None = None
    below: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Where a click on a series or a cell leads."""

    title: str
    url: str


def over_time(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    span: int = 12,
    stacked: bool = False,
    top: float | None = None,
    warn_above: float | None = None,
    points: bool = False,
    links: Sequence[Link] = (),
) -> timeseries.Panel:
    """Draw series over time.

    Args:
        top: Where a full axis ends.
        warn_above: A dashed line.
        points: Also draw single samples, of what is there for moments only.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .axis_soft_min(0)
        .line_width(1)
        .fill_opacity(60 if stacked else 0)
        .show_points(common_model.VisibilityMode.AUTO if points else common_model.VisibilityMode.NEVER)
        .color_scheme(dashboard.FieldColor().mode(_palette(targets)))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.RIGHT)
            .show_legend(True)
            .calcs(["mean", "lastNotNull"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
        .targets(_queries(targets, instant=False))
    )
    if links:
        panel.data_links(_links(links))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.axis_soft_max(top)
    if warn_above is not None:
        panel.thresholds(_steps(warn_above)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return panel


def _palette(targets: Sequence[Target]) -> model.FieldColorModeId:
    """Return colours by name where labels name the series, so that a phase has one colour in every panel.

    Two names can have the same colour. Series with fixed names, such as quantiles, have colours in order.
    """
    if any("{{" in target.legend for target in targets):
        return model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME
    return model.FieldColorModeId.PALETTE_CLASSIC


def now(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    span: int,
    text: common_model.BigValueTextMode = common_model.BigValueTextMode.AUTO,
    warn_above: float | None = None,
    warn_below: float | None = None,
    links: Sequence[Link] = (),
) -> stat.Panel:
    """Draw current values in big letters."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .no_value("none")
        .text_mode(text)
        .graph_mode(common_model.BigValueGraphMode.NONE)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .targets(_queries(targets, instant=True))
    )
    if links:
        panel.data_links(_links(links))
    if warn_above is not None:
        panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        panel.thresholds(_steps(warn_above))
    elif warn_below is not None:
        panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        panel.thresholds(_steps(warn_below, below=True))
    else:
        panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color("text"))
    return panel


def bars(
    title: str, description: str, *targets: Target, unit: str, span: int = 12, links: Sequence[Link] = ()
) -> bargauge.Panel:
    """Draw current values as horizontal bars."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .min(0)
        .no_value("none")
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .display_mode(common_model.BarGaugeDisplayMode.BASIC)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .targets(_queries(targets, instant=True))
    )
    if links:
        panel.data_links(_links(links))
    return panel


def rows_of(
    title: str,
    description: str,
    *columns: Column,
    keys: Mapping[str, Sequence[Link]],
    span: int = 24,
    height: int = 9,
) -> table.Panel:
    """Draw a table with one row for each combination of labels; pages keep a thousand rows readable.

    Args:
        keys: The labels, in the order of their columns, and where a click on each leads.
    """
    named = [(f"Value #{letter}", column.title) for letter, column in _lettered(columns)]
    hidden = ["Time", *(field for field, title in named if not title)]
    shown = [*keys, *(field for field, title in named if title)]
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(units.NoUnit)
        .span(span)
        .height(height)
        .no_value("")
        .filterable(True)
        .footer(common.TableFooterOptions().enable_pagination(True))
        .targets(_queries([Target(column.expr, "") for column in columns], instant=True, as_table=True))
        .with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": dict.fromkeys(hidden, True),
                    "indexByName": {field: at for at, field in enumerate(shown)},
                    "renameByName": {field: title for field, title in named if title},
                },
            )
        )
    )
    for column in columns:
        if column.title:
            panel.override_by_name(column.title, _column_settings(column))
    for key, links in keys.items():
        if links:
            urls = [{"title": link.title, "url": link.url} for link in links]
            panel.override_by_name(key, [model.DynamicConfigValue(id_val="links", value=urls)])
    return panel


def _column_settings(column: Column) -> list[model.DynamicConfigValue]:
    settings = [model.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.red_above is not None:
        low, high = ("red", "text") if column.below else ("text", "red")
        steps = [{"color": low, "value": None}, {"color": high, "value": column.red_above}]
        settings += [
            model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
            model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}),
            model.DynamicConfigValue(id_val="color", value={"mode": "thresholds"}),
        ]
    return settings


def _queries(targets: Sequence[Target], *, instant: bool, as_table: bool = False) -> list[Builder[Dataquery]]:
    built: list[Builder[Dataquery]] = []
    for letter, target in _lettered(targets):
        query = (
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .ref_id(letter)
            .expr(target.expr)
            .legend_format(target.legend)
            .editor_mode(prometheus_model.QueryEditorMode.CODE)
        )
        if as_table:
            query.format(prometheus_model.PromQueryFormat.TABLE)
        built.append(query.instant() if instant else query.range())
    return built


def _lettered(items: Sequence[Item]) -> list[tuple[str, Item]]:
    return list(zip(ascii_uppercase[: len(items)], items, strict=True))


def _links(links: Sequence[Link]) -> list[Builder[model.DashboardLink]]:
    return [
        dashboard.DashboardLink(link.title).type(model.DashboardLinkType.LINK).url(link.url) for link in links
    ]


def _steps(value: float, *, below: bool = False) -> dashboard.ThresholdsConfig:
    low, high = ("orange", "green") if below else ("green", "orange")
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(color=low), model.Threshold(value=value, color=high)])
    )
