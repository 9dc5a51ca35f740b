"""The newest kept run of a script, and what its card advised on the loader."""

import hashlib
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from torchperfd.errors import TorchperfdError
from torchperfd.model.settled_advice import SettledAdvice
from torchperfd.runs.record import read_record
from torchperfd.runs.store import RunStore

MAX_BYTES: Final = 8 << 20
"""Larger reports of earlier runs are not read."""
_MAX_RUNS: Final = 4
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class AdvisedRun:
    """What the card of a kept run advised.

    Attributes:
        run_id: Of the run, as ``torchperfd runs show`` takes it.
        settled: What it was advised on its loaders.
    """

    run_id: str
    settled: SettledAdvice


def newest_advised(store: RunStore, script: str) -> AdvisedRun | None:
    """Return what the newest run of a script on this machine was advised; None without such a run.

    Args:
        script: Path of the script.
    """
    host = os.environ.get("NODE_NAME") or socket.gethostname()
    with suppress(OSError):
        for run_id, content in store.newest_with(script_marker(script), _MAX_RUNS, MAX_BYTES):
            with suppress(TorchperfdError):
                record = read_record(content, run_id)
                if record.loader_advice is not None and record.host == host:
                    return AdvisedRun(run_id, record.loader_advice)
    return None


def script_marker(script: str) -> bytes:
    """Return the text by which :meth:`RunStore.newest_with` finds the runs of a script.

    Args:
        script: Its path.
    """
    return f'"path":"{script_digest(os.path.realpath(script))}"'.encode()


def script_digest(path: str) -> str:
    """Return the digest of a script's resolved path that reports contain in its place."""
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
