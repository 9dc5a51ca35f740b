"""Finds the memory snapshots among files and directories, and the rank of each."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon import analysis, untrusted_files
from torchperfd_daemon.analysis.trace_files import RANK_IN_NAME
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError, explained
from torchperfd_daemon.untrusted_files import is_pickle

_NAMED_SO: Final = re.compile(r".*\.(?:pickle|pkl)(?:\.(?:gz|xz|zst))?", re.DOTALL)
_HEAD_BYTES: Final = 64
_TRACE_BEGINS: Final = (b"{", b"[")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One rank's snapshot; the rank is None if its name does not have one."""

    rank: int | None
    path: Path


def find_snapshots(paths: Sequence[Path], note: Callable[[str], object]) -> list[SnapshotFile]:
    """Return the memory snapshots meant by files and directories, by rank; empty if all are something else.

    A file counts by its content, or by its name if it holds neither a pickle nor a trace. A directory counts
    if it holds snapshots and no traces; beside traces, ``note`` gets a line about them.

    Raises:
        TorchperfdError: A directory cannot be read.
        UsageError: Some of the paths are snapshots and some are not.
    """
    found, others = list[Path](), list[Path]()
    for path in paths:
        snapshots = _in_directory(path, note) if path.is_dir() else [path] if _is_snapshot(path) else []
        if snapshots:
            found += snapshots
        else:
            others.append(path)
    if found and others:
        raise UsageError(
            f"{found[0]} is a memory snapshot and {others[0]} is not", "analyse them one after the other"
        )
    files = [SnapshotFile(_rank(path), path) for path in dict.fromkeys(found)]
    return sorted(files, key=lambda file: (file.rank is None, file.rank or 0, file.path.name))


def _in_directory(path: Path, note: Callable[[str], object]) -> list[Path]:
    with explained(f"cannot read {path}"):
        found = [each for each in path.iterdir() if _NAMED_SO.fullmatch(each.name) and _is_snapshot(each)]
    if found and _holds_traces(path):
        note(f"left out {len(found)} memory snapshots beside the traces in {path}; name one to see it")
        return []
    return found


def _holds_traces(path: Path) -> bool:
    try:
        return bool(analysis.rank_files(path))
    except NoSuchTargetError:
        return False


def _is_snapshot(path: Path) -> bool:
    is_named_so = _NAMED_SO.fullmatch(path.name) is not None
    # Reading takes from a pipe what the next reader needs.
    if not path.is_file():
        return is_named_so and not path.exists()
    try:
        with path.open("rb") as file:
            head = untrusted_files.decompressed_head(file, _HEAD_BYTES)
    except (OSError, TorchperfdError):
        return is_named_so
    return is_pickle(head) or (is_named_so and not head.lstrip().startswith(_TRACE_BEGINS))


def _rank(path: Path) -> int | None:
    match = RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None
