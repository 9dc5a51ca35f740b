"""Expressions that several dashboards use."""

from typing import Final

from grafana.config import SELECTOR, metric

NODE: Final = "job, instance"
"""The labels of one daemon."""

BOARDS: Final = 'gpu!~".*:.*"'
"""Whole GPUs, without the instances into which MIG splits them."""


def rate(name: str, matchers: str = "", by: str = "") -> str:
    """Return the growth per second of a counter, summed, over the range that fits the panel."""
    return f"sum{_by(by)}(rate({metric(name, matchers)}[$__rate_interval]))"


def increase(name: str, matchers: str = "", by: str = "") -> str:
    """Return the growth of a counter over the dashboard's time range, summed."""
    return f"sum{_by(by)}(increase({metric(name, matchers)}[$__range]))"


def per(part: str, whole: str, by: str = "") -> str:
    """Return a quotient without a value where the whole is zero; a part may have labels beyond `by`."""
    matching = f" on ({by}) group_left ()" if by else ""
    return f"{part} /{matching} ({whole} > 0)"


def step_seconds(matchers: str = "", by: str = "") -> str:
    """Return seconds in training steps per second."""
    return rate("train_step_seconds_total", matchers, by)


def steps(matchers: str = "", by: str = "") -> str:
    """Return training steps per second."""
    return rate("train_steps_total", matchers, by)


def phase_seconds(phase: str, matchers: str = "", by: str = "") -> str:
    """Return seconds of a phase per second."""
    inside = ",".join(part for part in (matchers, f'phase="{phase}"') if part)
    return rate("train_phase_seconds_total", inside, by)


def own_work(matchers: str = "", by: str = "run, rank") -> str:
    """Return own work per step: step time less the wait for other ranks, which a lone rank does not have."""
    stepping = step_seconds(matchers, by)
    waiting = phase_seconds("collective_wait", matchers, by)
    return f"({stepping} - ({waiting} or {stepping} * 0)) / ({steps(matchers, by)} > 0)"


def ranks(matchers: str = "", by: str = "run") -> str:
    """Return the number of ranks that report; a rank that two daemons report counts once."""
    labels = ", ".join(part for part in (by, "rank") if part)
    return f"count{_by(by)}(count by ({labels}) ({metric('train_rank_info', matchers)}))"


def missing(matchers: str = "") -> str:
    """Return the number of ranks of each run that no daemon reports."""
    world = f"max by (run) ({metric('train_world_size', matchers)})"
    return f"clamp_min({world} - on (run) {ranks(matchers)}, 0)"


def lost_gpus(growth: str, matchers: str = "", by: str = "cause") -> str:
    """Return rank-seconds lost; a daemon reports seconds, which all of its ranks of that run lose.

    Args:
        growth: `rate` with its range, or `increase`, as in `rate {} [5m]` with braces for the metric.
    """
    lost = growth.format(metric("train_lost_seconds_total", matchers))
    of_node = f"count by ({NODE}, run) ({metric('train_rank_info', matchers)})"
    return f"sum by ({by}) ({lost} * on ({NODE}, run) group_left () {of_node})"


def on_nodes_of(run: str) -> str:
    """Keep, after an expression, the daemons that report ranks of a run."""
    return f"and on ({NODE}) {metric('train_rank_info', run)}"


def busiest(expr: str) -> str:
    """Keep the highest series only, as many as the dashboard's variable `top` names."""
    return f"topk($top, {expr})"


def up(matchers: str) -> str:
    """Return Prometheus' own metric of the daemons' scrapes."""
    return f"up{{{','.join(part for part in (SELECTOR, matchers) if part)}}}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
