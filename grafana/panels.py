"""What every panel of ours has in common, said once on top of Grafana's Foundation SDK."""

from dataclasses import dataclass
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model

DATASOURCE: Final = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel, and what the legend calls each of its series."""

    expr: str
    legend: str


def over_time(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    span: int = 12,
    stacked: bool = False,
    top: float | None = None,
    warn_above: float | None = None,
) -> timeseries.Panel:
    """Draw a panel of series over time; `top` is where a full axis ends, `warn_above` draws a line."""
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
        .fill_opacity(60 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        # By name, so that a phase has one colour in every panel.
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
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
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.axis_soft_max(top)
    if warn_above is not None:
        panel.thresholds(_warn_above(warn_above)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return panel


def now(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    span: int,
    text: common_model.BigValueTextMode = common_model.BigValueTextMode.AUTO,
    warn_above: float | None = None,
) -> stat.Panel:
    """Draw a panel of current values in big letters."""
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
    if warn_above is None:
        panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color("text"))
    else:
        panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        panel.thresholds(_warn_above(warn_above))
    return panel


def label_values(name: str, label: str, metric: str, *, many: bool) -> dashboard.QueryVariable:
    """Offer the values that a label of `metric` has in the dashboard's time range."""
    query = f"label_values({metric}, {name})"
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NUMERICAL_ASC if many else model.VariableSort.ALPHABETICAL_ASC)
        .multi(many)
        .include_all(many)
    )
    if many:
        variable.all_value(".*").current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return variable


def _queries(targets: tuple[Target, ...], *, instant: bool) -> list[Builder[Dataquery]]:
    built: list[Builder[Dataquery]] = []
    for letter, target in zip(ascii_uppercase, targets, strict=False):
        query = (
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .ref_id(letter)
            .expr(target.expr)
            .legend_format(target.legend)
            .editor_mode(prometheus_model.QueryEditorMode.CODE)
        )
        built.append(query.instant() if instant else query.range())
    return built


def _warn_above(value: float) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(color="green"), model.Threshold(value=value, color="orange")])
    )
