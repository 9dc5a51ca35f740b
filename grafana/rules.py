"""The table of rules: recording rules, and every alert with its text and its page."""

from typing import Final

from grafana.alerting import Alert, Recording
from grafana.config import DAEMONS, HARDWARE_THROTTLING, HARDWARE_XIDS, SELECTOR, metric

_NODE: Final = "job, instance"
_GPU: Final = "job, instance, gpu, gpu_uuid"
_STEP_MEAN: Final = "run:torchperfd_train_step_seconds:mean5m"


def _rate(name: str, matchers: str = "", *, by: str, window: str = "5m") -> str:
    return f"sum by ({by}) (rate({metric(name, matchers)}[{window}]))"


def _share_of_goodput(bucket: str, window: str) -> str:
    """Return the share of a run's rank-seconds that went to a bucket."""
    part = _rate("train_goodput_seconds_total", f'bucket="{bucket}"', by="run", window=window)
    whole = _rate("train_goodput_seconds_total", by="run", window=window)
    return f"{part}\n  / ({whole} > 0)"


_STEP_MEAN_NOW: Final = (
    f"{_rate('train_step_seconds_total', by='run')}\n  / ({_rate('train_steps_total', by='run')} > 0)"
)
_FAILED_CAPTURES: Final = metric("capture_requests_total", 'result=~"failed|partial"')

RECORDINGS: Final = (
    Recording("run:torchperfd_train_steps:rate5m", f"max by (run) (rate({metric('train_steps_total')}[5m]))"),
    Recording(_STEP_MEAN, _STEP_MEAN_NOW),
    Recording(
        "run_phase:torchperfd_train_phase:ratio5m",
        _rate("train_phase_seconds_total", 'phase!="validate"', by="run, phase")
        + f"\n  / on (run) group_left () ({_rate('train_step_seconds_total', by='run')} > 0)",
    ),
    Recording("run:torchperfd_train_goodput:ratio1h", _share_of_goodput("productive", "1h")),
    # Each daemon knows what its own ranks lost, so seconds count once per rank of that daemon.
    Recording(
        "cause:torchperfd_train_lost_gpus:rate5m",
        f"sum by (cause) (\n  rate({metric('train_lost_seconds_total')}[5m])\n"
        f"    * on ({_NODE}, run) group_left () count by ({_NODE}, run) ({metric('train_rank_info')})\n)",
    ),
)

_RUNS: Final = (
    Alert(
        "TorchperfdRunStalled",
        f"""
(
  time() - max by (run) ({metric("train_last_step_timestamp_seconds")} > 0) > {{threshold}}
  and on (run) max by (run) ({metric("train_state", 'state="training"')} == 1)
)
unless on (run) max by (run) ({metric("train_state", 'state=~"validating|checkpointing"')} == 1)""",
        "Run {{ $labels.run }} is training but makes no steps",
        "No rank of {{ $labels.run }} has finished a training step for {{ $value | humanizeDuration }}, "
        "and none is validating or writing a checkpoint.",
        "causes/hang",
        "`for` has to be long as well: just after a long validation the last step is old.\n"
        "A rank that validates or writes a checkpoint lets the others wait in state training, so one\n"
        "such rank excuses the run. The node's clock is compared with that of Prometheus.",
    ),
    Alert(
        "TorchperfdRunHang",
        "max by (run) (" + metric("train_verdict", 'cause="hang"') + ") > {threshold}",
        "Run {{ $labels.run }} hangs",
        "The daemon has found that {{ $labels.run }} makes no steps although its ranks are in training.",
        "causes/hang",
    ),
    Alert(
        "TorchperfdRanksMissing",
        f"""
max by (run) ({metric("train_world_size")})
  - on (run) count by (run) (count by (run, rank) ({metric("train_rank_info")}))
  > {{threshold}}
unless on (run) max by (run) ({metric("train_state", 'state="finished"')} == 1)""",
        "{{ $value }} ranks of run {{ $labels.run }} are not seen",
        "Run {{ $labels.run }} has {{ $value }} more ranks than report to a scraped daemon.",
        "runbooks",
        "Ranks end at different moments: a run of which one rank has finished is not incomplete.",
    ),
    Alert(
        "TorchperfdStraggler",
        f"""
max by (run, rank) ({metric("train_straggler_excess_seconds")})
  / on (run) group_left () (
    {_STEP_MEAN_NOW}
  )
  > {{threshold}}""",
        "Rank {{ $labels.rank }} delays run {{ $labels.run }} by {{ $value | humanizePercentage }} of a step",
        "The other ranks of {{ $labels.run }} wait for rank {{ $labels.rank }} during "
        "{{ $value | humanizePercentage }} of their step time.",
        "causes/slow-rank",
    ),
    Alert(
        "TorchperfdRunInputBound",
        f"""
{_rate("train_phase_seconds_total", 'phase="data"', by="run")}
  / ({_rate("train_step_seconds_total", by="run")} > 0)
  > {{threshold}}""",
        "Run {{ $labels.run }} spends {{ $value | humanizePercentage }} of its step time waiting for data",
        "The ranks of {{ $labels.run }} wait for the next batch during {{ $value | humanizePercentage }} "
        "of their training step time.",
        "causes/input-bound",
        "Every rank's share counts by the time it steps, so one slow reader among many stays below the\n"
        "limit. TorchperfdLoaderStarving finds that one.",
    ),
    Alert(
        "TorchperfdLoaderStarving",
        f"""
count by (run) (
  {_rate("train_phase_seconds_total", 'phase="data"', by="run, rank")}
    / ({_rate("train_step_seconds_total", by="run, rank")} > 0)
    > {{threshold}}
  and on (run, rank)
    max by (run, rank) (max_over_time({metric("train_dataloader_ready_batches")}[5m])) == 0
)""",
        "DataLoader workers of {{ $value }} ranks of run {{ $labels.run }} never have a batch ready",
        "{{ $value }} ranks of {{ $labels.run }} find no batch waiting whenever they ask for one, and lose "
        "step time to that.",
        "causes/input-bound",
        "Unlike TorchperfdRunInputBound it sees one starving rank among many, which in synchronous training\n"
        "delays all others. An empty queue alone does no harm while the wait for it is short.",
    ),
    Alert(
        "TorchperfdRunRegressed",
        f"""
{_STEP_MEAN}
  / quantile_over_time(0.5, {_STEP_MEAN}[6h] offset 30m)
  > {{threshold}}
and on (run) {_STEP_MEAN} offset 1h""",
        "Steps of run {{ $labels.run }} take {{ $value | humanizePercentage }} of what they took before",
        "The mean step of {{ $labels.run }} takes {{ $value | humanizePercentage }} of its median over the "
        "run's own past of up to six hours.",
        "runbooks",
        "The newest half hour is no part of the past, and a run younger than an hour has none.",
    ),
    Alert(
        "TorchperfdGoodputLow",
        f"""
{_share_of_goodput("productive", "1h")}
  < {{threshold}}
and on (run) max by (run) ({metric("train_goodput_seconds_total")} offset 1h)""",
        "Goodput of run {{ $labels.run }} is {{ $value | humanizePercentage }}",
        "Over the last hour, {{ $value | humanizePercentage }} of the rank-seconds of {{ $labels.run }} were "
        "productive steps.",
        "runbooks",
        "Start-up is unproductive: a run younger than an hour is not judged.",
    ),
    Alert(
        "TorchperfdCheckpointSlow",
        f"{_share_of_goodput('checkpoint', '30m')}\n  > {{threshold}}",
        "Run {{ $labels.run }} spends {{ $value | humanizePercentage }} of its time in checkpoints",
        "Over the last half hour, {{ $value | humanizePercentage }} of the rank-seconds of "
        "{{ $labels.run }} went to saving checkpoints.",
        "causes/checkpoint",
    ),
    Alert(
        "TorchperfdClientOverhead",
        f"max by (run) (avg_over_time({metric('client_overhead_ratio')}[5m])) > {{threshold}}",
        "torchperfd costs run {{ $labels.run }} {{ $value | humanizePercentage }} of its training time",
        "At least one rank of {{ $labels.run }} measures that torchperfd takes "
        "{{ $value | humanizePercentage }} of its training time.",
        "runbooks",
    ),
    Alert(
        "TorchperfdSlowHooks",
        f"""
count by (run) (count by (run, rank) ({metric("train_rank_info", 'hooks="reference"')})) > {{threshold}}""",
        "Run {{ $labels.run }} has ranks whose hooks run in Python",
        "The compiled hooks of torchperfd are missing on {{ $value }} ranks of {{ $labels.run }}; those in "
        "Python cost ten times as much.",
        "runbooks",
    ),
    Alert(
        "TorchperfdClientSkew",
        f"sum by (run) ({metric('train_unsupported_clients')}) > {{threshold}}",
        "{{ $value }} ranks of run {{ $labels.run }} have an unsupported version of torchperfd",
        "The clients of {{ $value }} ranks of {{ $labels.run }} and their daemons are more than "
        "one release apart.",
        "runbooks",
    ),
)

_HARDWARE: Final = (
    Alert(
        "TorchperfdGpuIdle",
        f"""
max by ({_GPU}, allocator, allocation) ({metric("gpu_allocation_info")})
  * on ({_GPU}) group_left ()
    (max by ({_GPU}) (max_over_time({metric("gpu_utilization_ratio")}[15m])) < {{threshold}})""",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is idle and allocated to {{ $labels.allocation }}",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is allocated by {{ $labels.allocator }} to "
        "{{ $labels.allocation }}, and its highest utilisation is {{ $value | humanizePercentage }}.",
        "runbooks",
    ),
    Alert(
        "TorchperfdGpuLost",
        f"1 - max by ({_GPU}) ({metric('gpu_up')}) > {{threshold}}",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is lost",
        "The driver no longer reaches GPU {{ $labels.gpu }} ({{ $labels.gpu_uuid }}) of "
        "{{ $labels.instance }}.",
        "runbooks",
    ),
    Alert(
        "TorchperfdGpuXid",
        f"""
time() - max by ({_GPU}, xid) ({metric("gpu_xid_last_timestamp_seconds", f'xid=~"{HARDWARE_XIDS}"')})
  < {{threshold}}""",
        "XID {{ $labels.xid }} on GPU {{ $labels.gpu }} of {{ $labels.instance }}",
        "The driver reported XID {{ $labels.xid }} for GPU {{ $labels.gpu }} ({{ $labels.gpu_uuid }}) "
        "{{ $value | humanizeDuration }} ago.",
        "runbooks",
        "increase() does not see the first XID of its kind, so the age of the newest one counts.",
    ),
    Alert(
        "TorchperfdGpuThrottled",
        f"""
sum by ({_GPU}, reason) (
  rate({metric("gpu_throttle_seconds_total", f'reason=~"{HARDWARE_THROTTLING}"')}[5m])
)
  > {{threshold}}""",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is throttled: {{ $labels.reason }}",
        "The hardware holds down the clocks of GPU {{ $labels.gpu }} of {{ $labels.instance }} for "
        "{{ $value | humanizePercentage }} of the time ({{ $labels.reason }}).",
        "causes/gpu-throttling",
    ),
    Alert(
        "TorchperfdGpuEccErrors",
        f"""
sum by ({_GPU}) (
  increase({metric("gpu_ecc_errors_total", 'type="uncorrected",scope="volatile"')}[1h])
)
  > {{threshold}}""",
        "Uncorrected memory errors on GPU {{ $labels.gpu }} of {{ $labels.instance }}",
        "GPU {{ $labels.gpu }} ({{ $labels.gpu_uuid }}) of {{ $labels.instance }} had uncorrected memory "
        "errors within the last hour.",
        "runbooks",
    ),
    Alert(
        "TorchperfdGpuRowRemap",
        f"""
max by ({_GPU}) ({metric("gpu_row_remap_pending")}) > {{threshold}}
or max by ({_GPU}) ({metric("gpu_row_remap_failure")}) > {{threshold}}""",
        "Memory rows of GPU {{ $labels.gpu }} of {{ $labels.instance }} need remapping",
        "A row remapping of GPU {{ $labels.gpu }} ({{ $labels.gpu_uuid }}) of {{ $labels.instance }} is "
        "pending or has failed.",
        "runbooks",
    ),
    Alert(
        "TorchperfdGpuMemoryNearlyFull",
        f"""
max by ({_GPU}) ({metric("gpu_memory_used_bytes")})
  / (max by ({_GPU}) ({metric("gpu_memory_total_bytes")}) > 0)
  > {{threshold}}""",
        "Memory of GPU {{ $labels.gpu }} of {{ $labels.instance }} is nearly full",
        "{{ $value | humanizePercentage }} of the memory of GPU {{ $labels.gpu }} of {{ $labels.instance }} "
        "is in use.",
        "causes/memory-pressure",
    ),
    Alert(
        "TorchperfdNodeMemoryNearlyFull",
        f"""
max by ({_NODE}) ({metric("node_memory_available_bytes")})
  / (max by ({_NODE}) ({metric("node_memory_total_bytes")}) > 0)
  < {{threshold}}""",
        "Memory of {{ $labels.instance }} is nearly full",
        "{{ $value | humanizePercentage }} of the memory of {{ $labels.instance }} is available; the kernel "
        "may kill a training process.",
        "causes/memory-pressure",
    ),
)

_DAEMON: Final = (
    Alert(
        "TorchperfdCapturesFailing",
        f"""
sum by ({_NODE}) ({_FAILED_CAPTURES})
  - (sum by ({_NODE}) ({_FAILED_CAPTURES} offset 1h) or 0 * sum by ({_NODE}) ({_FAILED_CAPTURES}))
  > {{threshold}}""",
        "{{ $value }} captures on {{ $labels.instance }} failed",
        "{{ $value }} captures that {{ $labels.instance }} coordinated within the last hour failed or lack "
        "some ranks.",
        "runbooks",
        "The series appears with the first failure, which increase() does not see.",
    ),
    Alert(
        "TorchperfdUploadsFailing",
        f"""
{_rate("captures_uploads_total", 'result=~"failed|refused"', by=_NODE, window="15m")} > {{threshold}}
and on ({_NODE}) max by ({_NODE}) ({metric("captures_upload_pending")}) > 0""",
        "Uploads of captures from {{ $labels.instance }} fail",
        "Attempts to upload captures from {{ $labels.instance }} fail, and captures wait.",
        "runbooks",
    ),
    Alert(
        "TorchperfdCapturesDiskFull",
        f"""
max by ({_NODE}) ({metric("captures_disk_free_bytes")})
  / (max by ({_NODE}) ({metric("captures_disk_size_bytes")}) > 0)
  < {{threshold}}""",
        "The disk of captures on {{ $labels.instance }} is nearly full",
        "{{ $value | humanizePercentage }} of the disk that holds the captures of {{ $labels.instance }} is "
        "free.",
        "runbooks",
    ),
    Alert(
        "TorchperfdDaemonDown",
        f"1 - max by ({_NODE}) (up{{{','.join(filter(None, (SELECTOR, DAEMONS)))}}}) > {{threshold}}",
        "The daemon {{ $labels.instance }} is down",
        "Prometheus cannot scrape the daemon {{ $labels.instance }}; its ranks, GPUs and node are not seen.",
        "runbooks",
    ),
    Alert(
        "TorchperfdCollectorFailing",
        f"1 - max by ({_NODE}, collector) ({metric('collector_success')}) > {{threshold}}",
        "Collector {{ $labels.collector }} of {{ $labels.instance }} fails",
        "The collector {{ $labels.collector }} of {{ $labels.instance }} has had no success; its metrics "
        "are missing or old.",
        "runbooks",
    ),
    Alert(
        "TorchperfdBackgroundFailing",
        f"sum by ({_NODE}, worker) (increase({metric('background_failures_total')}[15m])) > {{threshold}}",
        "Background worker {{ $labels.worker }} of {{ $labels.instance }} fails",
        "The worker {{ $labels.worker }} of the daemon {{ $labels.instance }} cannot finish its rounds.",
        "runbooks",
    ),
    Alert(
        "TorchperfdStepsDropped",
        f"""
{_rate("ingest_dropped_events_total", by=_NODE)}
  / (
    {_rate("ingest_dropped_events_total", by=_NODE)}
    + {_rate("ingest_events_total", by=_NODE)}
    > 0
  )
  > {{threshold}}""",
        "{{ $value | humanizePercentage }} of the steps of {{ $labels.instance }} are lost",
        "{{ $value | humanizePercentage }} of the steps on {{ $labels.instance }} do not reach the daemon. "
        "Totals stay exact; single steps are missing.",
        "runbooks",
    ),
    Alert(
        "TorchperfdSeriesCapped",
        f"sum by ({_NODE}) (rate({metric('label_overflow_total')}[5m])) > {{threshold}}",
        "The metrics page of {{ $labels.instance }} leaves out ranks",
        "The page of {{ $labels.instance }} has reached its cap on series; the newest ranks are not shown.",
        "runbooks",
    ),
    Alert(
        "TorchperfdVersionSkew",
        f"""
count by (job) (count by (job, version, revision) ({metric("build_info")})) > {{threshold}}""",
        "Daemons of {{ $labels.job }} run {{ $value }} builds of torchperfd",
        "For a day, {{ $labels.job }} has had daemons of {{ $value }} versions or commits.",
        "runbooks",
        "A day is enough for a rolling upgrade.",
    ),
)

ALERTS: Final = (*_RUNS, *_HARDWARE, *_DAEMON)
