"""Selectors, thresholds and names: the one place to edit for a site of your own.

Run `python -m grafana.build` after an edit: it writes dashboards, rules and their tests anew.
"""

from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.models import common as common_model

SELECTOR: Final = ""
"""Matchers that every query gets, such as `cluster="one"`; empty for none."""

DAEMONS: Final = 'job=~".*torchperfd.*"'
"""The scrape jobs of daemons, for `up`; Prometheus' operator puts a namespace before the name."""

RUNBOOKS: Final = ""
"""Where docs/runbooks.md and docs/causes are published as HTML; alerts name the pages if they are not."""

DATASOURCE: Final = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")

SCHEMA_VERSION: Final = 39
"""Grafana 11 opens it unchanged and newer ones migrate it; nothing here needs a later schema."""

REFRESH: Final = "30s"
TIME_FROM: Final = "now-1h"

MAX_SERIES: Final = 12
"""Series per panel of ranks or GPUs: the highest ones of the latest values. Eight GPUs fit."""

MAX_REPEATS: Final = 4
"""Panels side by side where a panel is repeated."""

HARDWARE_THROTTLING: Final = "hw_slowdown|hw_thermal_slowdown|hw_power_brake_slowdown"
"""Reasons of throttling that a healthy GPU under load does not have."""

HARDWARE_XIDS: Final = "48|62|64|74|79|94|95|119|120|140"
"""XIDs of failing hardware or firmware; others, such as 13 and 31, come from the script's own kernels."""


@dataclass(frozen=True, slots=True)
class Limit:
    """When an alert fires, and how urgent it is.

    Attributes:
        threshold: In the alert's unit: seconds, or a ratio of 0 to 1. Panels draw the same line.
        hold: How long the condition must last, as Prometheus writes it.
        severity: `critical` for what wastes all of a run's GPUs now, else `warning`.
    """

    threshold: float
    hold: str
    severity: str = "warning"


LIMITS: Final = {
    # Runs.
    "TorchperfdRunStalled": Limit(300, "5m", "critical"),
    "TorchperfdRunHang": Limit(0, "1m", "critical"),
    "TorchperfdRanksMissing": Limit(0, "10m"),
    "TorchperfdStraggler": Limit(0.1, "10m"),
    "TorchperfdRunInputBound": Limit(0.3, "10m"),
    "TorchperfdLoaderStarving": Limit(0.1, "10m"),
    "TorchperfdRunRegressed": Limit(1.25, "15m"),
    "TorchperfdGoodputLow": Limit(0.7, "30m"),
    "TorchperfdCheckpointSlow": Limit(0.1, "15m"),
    "TorchperfdClientOverhead": Limit(0.01, "10m"),
    "TorchperfdSlowHooks": Limit(0, "10m"),
    "TorchperfdClientSkew": Limit(0, "10m"),
    # GPUs and nodes.
    "TorchperfdGpuIdle": Limit(0.05, "30m"),
    "TorchperfdGpuLost": Limit(0, "2m", "critical"),
    "TorchperfdGpuXid": Limit(600, "0m", "critical"),
    "TorchperfdGpuThrottled": Limit(0.1, "10m"),
    "TorchperfdGpuEccErrors": Limit(0, "0m", "critical"),
    "TorchperfdGpuRowRemap": Limit(0, "5m"),
    "TorchperfdGpuMemoryNearlyFull": Limit(0.97, "10m"),
    "TorchperfdNodeMemoryNearlyFull": Limit(0.05, "5m", "critical"),
    # Captures and daemons.
    "TorchperfdCapturesFailing": Limit(0, "0m"),
    "TorchperfdUploadsFailing": Limit(0, "15m"),
    "TorchperfdCapturesDiskFull": Limit(0.05, "10m"),
    "TorchperfdDaemonDown": Limit(0, "5m", "critical"),
    "TorchperfdCollectorFailing": Limit(0, "10m"),
    "TorchperfdBackgroundFailing": Limit(0, "15m"),
    "TorchperfdStepsDropped": Limit(0.01, "10m"),
    "TorchperfdSeriesCapped": Limit(0, "10m"),
    "TorchperfdVersionSkew": Limit(1, "1d"),
}
"""Each alert's limit, by its name. `grafana/rules.py` has the expressions."""


def threshold(alert: str) -> float:
    """Return the threshold of an alert, for a panel that shows the same quantity."""
    return LIMITS[alert].threshold


def metric(name: str, matchers: str = "") -> str:
    """Return a selector of a metric without the prefix `torchperfd_`, with the site's own matchers."""
    inside = ",".join(part for part in (SELECTOR, matchers) if part)
    return f"torchperfd_{name}{{{inside}}}" if inside else f"torchperfd_{name}"
