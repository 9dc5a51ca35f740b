"""Scenarios of captures and daemons."""

from typing import Final

from grafana.alerting import Case, Firing

_AT: Final = {"job": "torchperfd", "instance": "node-a:9407"}


def _own(name: str, **more: str) -> str:
    matchers = ",".join(f'{key}="{value}"' for key, value in {**_AT, **more}.items())
    return f"torchperfd_{name}{{{matchers}}}"


def _build(instance: str, version: str, revision: str) -> str:
    labels = f'job="torchperfd",instance="{instance}",version="{version}",revision="{revision}"'
    return f"torchperfd_build_info{{{labels}}}"


_CAPTURES: Final = (
    # The series of failures begins with the first, and that one is old an hour later.
    Case(
        "TorchperfdCapturesFailing",
        "the first capture that fails",
        {
            _own("capture_requests_total", trigger="command", result="complete"): "3x120",
            _own("capture_requests_total", trigger="rule", result="failed"): "_x9 1x110",
        },
        {"8m": (), "15m": (Firing(_AT, "1"),), "80m": ()},
    ),
    Case(
        "TorchperfdCapturesFailing",
        "captures that complete or are cancelled",
        {
            _own("capture_requests_total", trigger="command", result="complete"): "0+1x30",
            _own("capture_requests_total", trigger="command", result="cancelled"): "0+1x30",
        },
        {"20m": ()},
    ),
    Case(
        "TorchperfdUploadsFailing",
        "uploads that fail for half an hour",
        {
            _own("captures_uploads_total", result="failed"): "0+1x40 40x40",
            _own("captures_upload_pending"): "2x40 0x40",
        },
        {"10m": (), "30m": (Firing(_AT),), "70m": ()},
    ),
    Case(
        "TorchperfdUploadsFailing",
        "one attempt that failed, and nothing that waits",
        {
            _own("captures_uploads_total", result="failed"): "0x10 1x40",
            _own("captures_uploads_total", result="uploaded"): "0+1x50",
            _own("captures_upload_pending"): "0x50",
        },
        {"20m": (), "40m": ()},
    ),
    Case(
        "TorchperfdCapturesDiskFull",
        "a disk with 3 % free, then with half",
        {_own("captures_disk_free_bytes"): "3x30 50x30", _own("captures_disk_size_bytes"): "100x60"},
        {"5m": (), "20m": (Firing(_AT, "3%"),), "50m": ()},
    ),
    Case(
        "TorchperfdCapturesDiskFull",
        "a disk with a fifth free",
        {_own("captures_disk_free_bytes"): "20x30", _own("captures_disk_size_bytes"): "100x30"},
        {"20m": ()},
    ),
)

_HEALTH: Final = (
    Case(
        "TorchperfdDaemonDown",
        "a daemon that ends",
        {'up{job="monitoring/torchperfd",instance="node-a:9407"}': "1x5 0x20 1x10"},
        {
            "8m": (),
            "15m": (Firing({"job": "monitoring/torchperfd", "instance": "node-a:9407"}),),
            "30m": (),
        },
    ),
    Case(
        "TorchperfdDaemonDown",
        "a daemon that is up, and another job that is not",
        {
            'up{job="torchperfd",instance="node-a:9407"}': "1x30",
            'up{job="dcgm",instance="node-a:9400"}': "0x30",
        },
        {"20m": ()},
    ),
    Case(
        "TorchperfdCollectorFailing",
        "a collector that fails for 20 min",
        {_own("collector_success", collector="nvml"): "1x5 0x20 1x10"},
        {"10m": (), "20m": (Firing({**_AT, "collector": "nvml"}),), "30m": ()},
    ),
    Case(
        "TorchperfdCollectorFailing",
        "a collector that fails for a moment",
        {_own("collector_success", collector="nvml"): "1x5 0x3 1x30"},
        {"8m": (), "20m": ()},
    ),
    Case(
        "TorchperfdBackgroundFailing",
        "a worker that fails each minute",
        {_own("background_failures_total", worker="retention"): "0+1x40 40x40"},
        {"10m": (), "30m": (Firing({**_AT, "worker": "retention"}),), "70m": ()},
    ),
    Case(
        "TorchperfdBackgroundFailing",
        "a worker that failed once",
        {_own("background_failures_total", worker="goodput"): "0x10 1x50"},
        {"20m": (), "50m": ()},
    ),
    Case(
        "TorchperfdStepsDropped",
        "a tenth of all steps is lost",
        {
            _own("ingest_dropped_events_total", where="ring"): "0+10x30 300x30",
            _own("ingest_dropped_events_total", where="outbox"): "0x60",
            _own("ingest_events_total"): "0+90x60",
        },
        {"5m": (), "20m": (Firing(_AT, "10%"),), "50m": ()},
    ),
    Case(
        "TorchperfdStepsDropped",
        "hardly a step is lost, and no step at all",
        {
            _own("ingest_dropped_events_total", where="ring"): "0+1x30",
            _own("ingest_events_total"): "0+1000x30",
            'torchperfd_ingest_dropped_events_total{job="torchperfd",instance="b",where="ring"}': "0x30",
            'torchperfd_ingest_events_total{job="torchperfd",instance="b"}': "0x30",
        },
        {"20m": ()},
    ),
    Case(
        "TorchperfdSeriesCapped",
        "a page that leaves out series",
        {_own("label_overflow_total"): "0+50x30 1500x30"},
        {"5m": (), "20m": (Firing(_AT),), "50m": ()},
    ),
    Case(
        "TorchperfdVersionSkew",
        "an upgrade that one node has missed",
        {
            _build("a", "0.2.0", "1111aaaa2222"): "1x1500",
            _build("b", "0.2.0", "1111aaaa2222"): "1x1500",
            _build("c", "0.2.0", "3333bbbb4444"): "1x1500",
        },
        {"12h": (), "1500m": (Firing({"job": "torchperfd"}, "2"),)},
    ),
    Case(
        "TorchperfdVersionSkew",
        "an upgrade that takes two hours",
        {
            _build("a", "0.2.0", "1111aaaa2222"): "1x1500",
            _build("b", "0.1.0", "3333bbbb4444"): "1x120",
            _build("b", "0.2.0", "1111aaaa2222"): "_x120 1x1380",
        },
        {"1h": (), "1500m": ()},
    ),
    Case("TorchperfdSeriesCapped", "a page with room", {_own("label_overflow_total"): "0x30"}, {"20m": ()}),
)

DAEMON: Final = (*_CAPTURES, *_HEALTH)
