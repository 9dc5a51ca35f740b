"""The dashboard of the daemons: whether they see everything, and what they do."""

from typing import Final

from grafana.config import DAEMONS, metric
from grafana.layout import DAEMON, NODE, Panels, Row, address, build, label_values, top
from grafana.panels import Column, Link, Target, now, over_time, rows_of
from grafana.queries import busiest, rate, up
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

_AT: Final = 'instance=~"$instance"'
_NO_UPLOADS: Final = "Empty where uploads are off."


def daemon_dashboard() -> model.Dashboard:
    """Build the dashboard."""
    return build(
        DAEMON,
        "Do the daemons answer, see everything, and keep their captures?",
        [label_values("instance", "Daemon", metric("build_info"), many=True), top()],
        [
            Row("Now", _now()),
            Row("What they see", _seen()),
            Row("Captures", _captures()),
            Row("Uploads, analyses and triggers", _work(), collapsed=True),
            Row("Collectors and workers", _workers(), collapsed=True),
        ],
    )


def _now() -> Panels:
    node = [Link("Node", address(NODE, instance="${__data.fields.instance:percentencode}"))]
    return [
        now(
            "Daemons up",
            "Chosen daemons that answer.",
            Target(f"sum({up(f'{DAEMONS},{_AT}')})", ""),
            unit=units.NoUnit,
            span=4,
        ),
        now(
            "Clients",
            "Training processes that are connected.",
            Target(f"sum({metric('clients', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
        ),
        now(
            "Collectors failing",
            "Collectors whose newest sample failed.",
            Target(f"sum(1 - {metric('collector_success', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
            warn_above=1,
        ),
        now(
            "Failures of workers",
            "Rounds that background workers could not finish, in the time range.",
            Target(f"sum(increase({metric('background_failures_total', _AT)}[$__range]))", ""),
            unit=units.NoUnit,
            span=4,
            warn_above=1,
        ),
        now(
            "Captures in progress",
            "Captures that are armed or being written; steps are slower meanwhile.",
            Target(f"sum({metric('capture_active', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
        ),
        now(
            "Series left out",
            "Series per second that metrics pages leave out because of their cap.",
            Target(rate("label_overflow_total", _AT), ""),
            unit=units.CountsPerSecond,
            span=4,
            warn_above=1e-9,
        ),
        rows_of(
            "Daemons",
            "One row for each daemon, version and commit. A click on an instance opens its node.",
            Column("", f"max by (instance, version, revision, python_version) ({metric('build_info', _AT)})"),
            Column("clients", f"max by (instance) ({metric('clients', _AT)})"),
            Column("captures", f"max by (instance) ({metric('captures', _AT)})"),
            keys={"instance": node, "version": [], "revision": [], "python_version": []},
            height=6,
        ),
    ]


def _seen() -> Panels:
    return [
        over_time(
            "Steps received",
            "Steps per second that reach each daemon.",
            Target(busiest(rate("ingest_events_total", _AT, "instance")), "{{instance}}"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Steps dropped",
            "Steps per second that did not reach a daemon, by where they were lost. Counts and totals stay "
            "exact; only single steps are missing.",
            Target(
                busiest(rate("ingest_dropped_events_total", _AT, "instance, where")), "{{instance}} {{where}}"
            ),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Scrape duration",
            "Time that Prometheus needs for a daemon's page.",
            Target(busiest(f"scrape_duration_seconds{{{DAEMONS},{_AT}}}"), "{{instance}}"),
            unit=units.Seconds,
        ),
        over_time(
            "Series on the page",
            "Samples that Prometheus reads from a daemon's page; the cap is 5,000.",
            Target(busiest(f"scrape_samples_scraped{{{DAEMONS},{_AT}}}"), "{{instance}}"),
            unit=units.NoUnit,
        ),
    ]


def _captures() -> Panels:
    free = f"{metric('captures_disk_free_bytes', _AT)} / {metric('captures_disk_size_bytes', _AT)}"
    return [
        over_time(
            "Captures by result",
            "Captures since the daemons started, by who asked for them and how they ended. A total and not a "
            "rate, because a rate misses the first. Empty until the first capture.",
            Target(
                f"sum by (trigger, result) ({metric('capture_requests_total', _AT)})",
                "{{trigger}} {{result}}",
            ),
            unit=units.NoUnit,
        ),
        over_time(
            "Stored captures",
            "What the captures directories take on their disks.",
            Target(busiest(metric("captures_bytes", _AT)), "{{instance}}"),
            unit=units.BytesIEC,
        ),
        over_time(
            "Free disk for captures",
            "Share of the disk of captures that is free. Empty until a daemon has a captures directory.",
            Target(f"bottomk($top, {free})", "{{instance}}"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Captures removed",
            "Captures per second that were removed because of the quota, by its limit.",
            Target(rate("captures_removed_total", _AT, "reason"), "{{reason}}"),
            unit=units.CountsPerSecond,
        ),
    ]


def _work() -> Panels:
    return [
        over_time(
            "Uploads",
            f"Attempts per second to upload a capture, by result. {_NO_UPLOADS}",
            Target(rate("captures_uploads_total", _AT, "result"), "{{result}}"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Captures waiting for upload",
            f"Captures that wait to be uploaded, of the daemons with most. {_NO_UPLOADS}",
            Target(busiest(metric("captures_upload_pending", _AT)), "{{instance}}"),
            unit=units.NoUnit,
        ),
        over_time(
            "Analyses",
            "Analyses of captures per second, by result. Empty where analyses are off.",
            Target(rate("captures_analyses_total", _AT, "result"), "{{result}}"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Triggers",
            "What became of triggers, by rule and result. Empty until a trigger acted.",
            Target(f"sum by (rule, result) ({metric('triggers_total', _AT)})", "{{rule}} {{result}}"),
            unit=units.NoUnit,
        ),
    ]


def _workers() -> Panels:
    return [
        over_time(
            "Collectors",
            "One for a collector whose newest sample succeeded, zero for one that failed; the worst first.",
            Target(f"bottomk($top, {metric('collector_success', _AT)})", "{{instance}} {{collector}}"),
            unit=units.NoUnit,
            top=1,
        ),
        over_time(
            "Time of collectors",
            "Time that the newest sample of the slowest collectors took.",
            Target(busiest(metric("collector_duration_seconds", _AT)), "{{instance}} {{collector}}"),
            unit=units.Seconds,
        ),
        over_time(
            "Age of collectors' newest success",
            "Time since a collector succeeded, of the oldest.",
            Target(
                busiest(f"time() - {metric('collector_last_success_timestamp_seconds', _AT)}"),
                "{{instance}} {{collector}}",
            ),
            unit=units.Seconds,
        ),
        over_time(
            "Failures of background workers",
            "Rounds per second that a worker could not finish.",
            Target(rate("background_failures_total", _AT, "worker"), "{{worker}}"),
            unit=units.CountsPerSecond,
        ),
    ]
