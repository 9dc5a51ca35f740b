"""Which capture a trace belongs to, for the head of a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.errors import TorchperfdError


def capture_facts(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return run, job, nodes, versions and time of the capture that traces are of; times in Unix seconds.

    None where they lie in no capture's folder, or in those of several, or where its manifest cannot be read.
    """
    folders = {(path if path.is_dir() else path.parent).resolve() for path in paths}
    if len(folders) != 1:
        return None
    (folder,) = folders
    try:
        found = Catalog(folder.parent).found(folder.name)
    except (TorchperfdError, OSError):
        return None
    record = None if found is None else found.record
    if record is None:
        return None

    def each(name: str) -> list[str]:
        return sorted({str(getattr(rank, name)) for rank in record.ranks} - {""})

    return {
        "capture_id": record.capture_id,
        "run": record.run,
        "job": record.job_name,
        "trigger": record.trigger,
        "requested_at": record.requested_at,
        "world_size": record.world_size,
        "steps": list(record.step_range) if record.step_range else None,
        "nodes": each("node"),
        "torch_versions": each("torch_version"),
        "python_versions": each("python_version"),
        "torchperfd_versions": each("client_version"),
    }
