"""The metrics that dashboards and alerts may name, each with its labels; the daemon has to export them."""

import re
from collections.abc import Iterator
from typing import Final

_RANK: Final = frozenset({"run", "rank"})
_GPU: Final = frozenset({"gpu", "gpu_uuid"})
_NONE: Final[frozenset[str]] = frozenset()
_OF_SCRAPE: Final = frozenset({"job", "instance"})
"""Labels that Prometheus adds to all series of a target."""

METRICS: Final[dict[str, frozenset[str]]] = {
    "torchperfd_train_steps_total": _RANK,
    "torchperfd_train_step_seconds_total": _RANK,
    "torchperfd_train_phase_seconds_total": _RANK | {"phase"},
    "torchperfd_train_phase_device_seconds_total": _RANK | {"phase"},
    "torchperfd_train_samples_total": _RANK,
    "torchperfd_train_tokens_total": _RANK,
    "torchperfd_train_micro_batches_total": _RANK,
    "torchperfd_train_skipped_optimizer_steps_total": _RANK,
    "torchperfd_train_validate_steps_total": _RANK,
    "torchperfd_train_checkpoint_seconds_total": _RANK,
    "torchperfd_train_background_save_seconds_total": _RANK,
    "torchperfd_train_sync_wait_seconds_total": _RANK,
    "torchperfd_train_gc_seconds_total": _RANK,
    "torchperfd_train_dataloader_ready_batches": _RANK,
    "torchperfd_train_cuda_allocated_bytes": _RANK,
    "torchperfd_train_cuda_reserved_bytes": _RANK,
    "torchperfd_train_cuda_peak_bytes": _RANK,
    "torchperfd_train_host_memory_bytes": _RANK,
    "torchperfd_train_step_flops": _RANK,
    "torchperfd_train_model_flops_utilization_ratio": _RANK,
    "torchperfd_train_last_step_timestamp_seconds": _RANK,
    "torchperfd_train_world_size": _RANK,
    "torchperfd_train_state": _RANK | {"state"},
    "torchperfd_train_rank_info": _RANK
    | {
        "job_name",
        "node",
        "local_rank",
        "node_rank",
        "script",
        "framework",
        "torch_version",
        "python_version",
        "gpu_uuid",
        "slurm_job_id",
        "pod_uid",
        "torchelastic_run_id",
        "user",
        "hooks",
        "client_version",
        *("data_rank", "tensor_rank", "pipeline_rank", "expert_rank", "context_rank"),
    },
    "torchperfd_train_unsupported_clients": frozenset({"run"}),
    "torchperfd_train_step_duration_seconds": frozenset({"run"}),
    "torchperfd_train_verdict": frozenset({"run", "cause"}),
    "torchperfd_train_step_part_seconds": frozenset({"run", "part", "name"}),
    "torchperfd_train_step_hidden_seconds": frozenset({"run", "part", "name"}),
    "torchperfd_train_lost_seconds_total": frozenset({"run", "cause"}),
    "torchperfd_train_straggler_excess_seconds": _RANK,
    "torchperfd_train_own_work_seconds": _RANK,
    "torchperfd_train_peer_wait_seconds": _RANK,
    "torchperfd_train_own_work_error_seconds": _RANK,
    "torchperfd_train_cause_seconds": frozenset({"run", "cause", "blamed_rank", "phase"}),
    "torchperfd_train_stalled_seconds": frozenset({"run"}),
    "torchperfd_train_verdict_unseen_ranks": frozenset({"run"}),
    "torchperfd_train_goodput_seconds_total": frozenset({"run", "bucket"}),
    "torchperfd_client_overhead_ratio": _RANK,
    "torchperfd_client_shed_tiers": _RANK,
    "torchperfd_client_hook_active": _RANK | {"hook"},
    "torchperfd_node_cpu_utilization_ratio": _NONE,
    "torchperfd_node_memory_available_bytes": _NONE,
    "torchperfd_node_memory_total_bytes": _NONE,
    "torchperfd_node_network_bytes_total": frozenset({"direction"}),
    "torchperfd_node_disk_busy_seconds_total": _NONE,
    "torchperfd_node_disk_bytes_total": frozenset({"direction"}),
    "torchperfd_node_pressure_seconds_total": frozenset({"resource", "kind"}),
    "torchperfd_gpu_info": _GPU | {"model", "driver_version", "pci_bus_id"},
    "torchperfd_gpu_utilization_ratio": _GPU,
    "torchperfd_gpu_memory_used_bytes": _GPU,
    "torchperfd_gpu_memory_total_bytes": _GPU,
    "torchperfd_gpu_power_watts": _GPU,
    "torchperfd_gpu_temperature_celsius": _GPU | {"sensor"},
    "torchperfd_gpu_energy_joules_total": _GPU,
    "torchperfd_gpu_up": _GPU,
    "torchperfd_gpu_mig_info": _GPU | {"parent_gpu", "parent_gpu_uuid"},
    "torchperfd_gpu_sm_active_ratio": _GPU,
    "torchperfd_gpu_sm_occupancy_ratio": _GPU,
    "torchperfd_gpu_tensor_active_ratio": _GPU,
    "torchperfd_gpu_dram_active_ratio": _GPU,
    "torchperfd_gpu_clock_hertz": _GPU | {"domain"},
    "torchperfd_gpu_throttle_seconds_total": _GPU | {"reason"},
    "torchperfd_gpu_pcie_bytes_total": _GPU | {"direction"},
    "torchperfd_gpu_nvlink_bytes_total": _GPU | {"direction"},
    "torchperfd_gpu_ecc_errors_total": _GPU | {"type", "scope"},
    "torchperfd_gpu_row_remap_pending": _GPU,
    "torchperfd_gpu_row_remap_failure": _GPU,
    "torchperfd_gpu_xid_errors_total": _GPU | {"xid"},
    "torchperfd_gpu_xid_last_timestamp_seconds": _GPU | {"xid"},
    "torchperfd_gpu_allocation_info": _GPU | {"allocator", "allocation"},
    "torchperfd_process_cpu_seconds_total": _RANK,
    "torchperfd_process_resident_memory_bytes": _RANK,
    "torchperfd_process_io_bytes_total": _RANK | {"direction"},
    "torchperfd_process_run_delay_seconds_total": _RANK,
    "torchperfd_process_collective_run_delay_seconds_total": _RANK,
    "torchperfd_process_thread_cpu_seconds_total": _RANK | {"thread"},
    "torchperfd_process_involuntary_switches_total": _RANK,
    "torchperfd_process_allowed_cpus": _RANK | {"numa_node"},
    "torchperfd_process_throttled_seconds_total": _RANK,
    "torchperfd_process_cpu_limit_cores": _RANK,
    "torchperfd_process_memory_limit_bytes": _RANK,
    "torchperfd_process_gpu_memory_bytes": _RANK,
    "torchperfd_capture_requests_total": frozenset({"trigger", "result"}),
    "torchperfd_capture_active": _NONE,
    "torchperfd_capture_bytes_total": _NONE,
    "torchperfd_capture_last_success_timestamp_seconds": _NONE,
    "torchperfd_captures": _NONE,
    "torchperfd_captures_bytes": _NONE,
    "torchperfd_captures_disk_free_bytes": _NONE,
    "torchperfd_captures_disk_size_bytes": _NONE,
    "torchperfd_captures_removed_total": frozenset({"reason"}),
    "torchperfd_background_failures_total": frozenset({"worker"}),
    "torchperfd_background_last_success_timestamp_seconds": frozenset({"worker"}),
    "torchperfd_triggers_total": frozenset({"rule", "result"}),
    "torchperfd_otlp_messages_total": frozenset({"result"}),
    "torchperfd_otlp_points_total": frozenset({"result"}),
    "torchperfd_otlp_last_success_timestamp_seconds": _NONE,
    "torchperfd_lake_rows_total": frozenset({"result"}),
    "torchperfd_lake_pending_rows": _NONE,
    "torchperfd_lake_pending_bytes": _NONE,
    "torchperfd_lake_sent_bytes_total": _NONE,
    "torchperfd_lake_last_success_timestamp_seconds": _NONE,
    "torchperfd_kubernetes_events_total": frozenset({"result"}),
    "torchperfd_captures_uploads_total": frozenset({"result"}),
    "torchperfd_captures_upload_pending": _NONE,
    "torchperfd_captures_upload_bytes_total": _NONE,
    "torchperfd_captures_upload_last_success_timestamp_seconds": _NONE,
    "torchperfd_captures_analyses_total": frozenset({"result"}),
    "torchperfd_captures_analysis_last_success_timestamp_seconds": _NONE,
    "torchperfd_train_captured_device_time_ratio": frozenset({"run", "rank", "part"}),
    "torchperfd_build_info": frozenset({"version", "revision", "python_version"}),
    "torchperfd_clients": _NONE,
    "torchperfd_daemon_process_cpu_seconds_total": _NONE,
    "torchperfd_daemon_process_resident_memory_bytes": _NONE,
    "torchperfd_daemon_process_virtual_memory_bytes": _NONE,
    "torchperfd_daemon_process_open_fds": _NONE,
    "torchperfd_daemon_process_max_fds": _NONE,
    "torchperfd_daemon_process_start_time_seconds": _NONE,
    "torchperfd_daemon_calls_total": frozenset({"method", "code"}),
    "torchperfd_daemon_call_seconds_total": frozenset({"method"}),
    "torchperfd_daemon_logged_errors_total": _NONE,
    "torchperfd_daemon_dropped_peers_total": frozenset({"source"}),
    "torchperfd_daemon_refused_calls_total": frozenset({"listener"}),
    "torchperfd_label_overflow_total": _NONE,
    "torchperfd_ingest_events_total": _NONE,
    "torchperfd_ingest_dropped_events_total": frozenset({"where"}),
    "torchperfd_collector_success": frozenset({"collector"}),
    "torchperfd_collector_duration_seconds": frozenset({"collector"}),
    "torchperfd_collector_last_success_timestamp_seconds": frozenset({"collector"}),
}

_SELECTOR: Final = re.compile(r"\b(?P<name>torchperfd_\w+)(?:\{(?P<matchers>[^}]*)\})?")
_MATCHER: Final = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"')
_HISTOGRAM_SUFFIX: Final = re.compile(r"_(bucket|sum|count)$")


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Find every metric of ours in a PromQL expression, with the labels it is selected by."""
    for match in _SELECTOR.finditer(expr):
        labels = {matcher["label"] for matcher in _MATCHER.finditer(match["matchers"] or "")}
        name = match["name"]
        yield (name if name in METRICS else _HISTOGRAM_SUFFIX.sub("", name)), labels


def unknown(expr: str) -> set[str]:
    """Name what an expression asks for and no daemon exports: metrics, and labels of metrics."""
    problems = set()
    for name, labels in selectors(expr):
        if name not in METRICS:
            problems.add(name)
        else:
            problems |= {f"{name}{{{label}}}" for label in labels - METRICS[name] - _OF_SCRAPE}
    return problems
