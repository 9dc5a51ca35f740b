"""Which capture a trace belongs to, for the head of a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchperfd.model.settled_advice import SettledAdvice
from torchperfd_daemon.captures import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.errors import TorchperfdError


def capture_record(paths: Sequence[Path]) -> CaptureRecord | None:
    """Return the capture that traces are of.

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
    return None if found is None else found.record


def loader_advice(paths: Sequence[Path]) -> SettledAdvice | None:
    """Return what the run of a capture was advised on its loaders; None if the capture has no such advice."""
    record = capture_record(paths)
    settled = None if record is None else record.loader_advice
    return settled if settled is not None and settled.is_sound() else None


def capture_facts(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return run, job, nodes, versions and time of the capture that traces are of; times in Unix seconds."""
    record = capture_record(paths)
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
