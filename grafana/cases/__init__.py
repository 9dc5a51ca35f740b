"""Scenarios in which alerts fire and are silent; promtool runs them on the generated rules."""

from typing import Final

from grafana.alerting import Case
from grafana.cases.daemon import DAEMON
from grafana.cases.hardware import HARDWARE
from grafana.cases.recordings import RECORDED
from grafana.cases.runs import RUNS

__all__ = ["CASES", "RECORDED"]

CASES: Final[tuple[Case, ...]] = (*RUNS, *HARDWARE, *DAEMON)
