"""Shared by commands that read traces: one sentence for each kind of file that is easily taken for one."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from torchperfd_daemon import untrusted_files
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.flight_recorder.dumps import is_dump

_HEAD_BYTES: Final = 1 << 13
_MAX_LOOKED_INTO: Final = 4
_RECORD: Final = "record a trace with torch.profiler or `torchperfd capture`"
_NSIGHT: Final = "open it with `nsys stats`, or " + _RECORD


class _Kind(NamedTuple):
    """What a file is, and what to do with it."""

    what: str
    remedy: str


_CHECKPOINT: Final = _Kind("a checkpoint of torch.save", f"{_RECORD}; a checkpoint has no times")
# By the end of the name.
_BY_NAME: Final = (
    ((".nsys-rep", ".qdrep", ".qdstrm"), _Kind("a report of Nsight Systems", _NSIGHT)),
    ((".ncu-rep",), _Kind("a report of Nsight Compute", f"open it with `ncu --import`, or {_RECORD}")),
    (
        (".pftrace", ".perfetto-trace"),
        _Kind("a binary trace of Perfetto", f"open it at ui.perfetto.dev, or {_RECORD}"),
    ),
    ((".safetensors",), _Kind("a file of weights (safetensors)", _RECORD)),
)
_TENSORBOARD: Final = _Kind("a log of TensorBoard", f"open it with `tensorboard`, or {_RECORD}")
_BY_BEGIN: Final = (
    # The magic number of torch.save before torch 1.6, as a pickle.
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", _CHECKPOINT),
    (b"BZh", _Kind("compressed with bzip2", "decompress it with `bunzip2` first")),
    (b"\x04\x22\x4d\x18", _Kind("compressed with lz4", "decompress it with `lz4 -d` first")),
    (b"7z\xbc\xaf\x27\x1c", _Kind("a 7-Zip archive", "extract it first")),
)
# All of the texts must be in the beginning of the file, and none of a trace's.
_BY_CONTENT: Final = (
    (
        (b'"model_name"', b'"timestamps"'),
        _Kind(
            "a request trace of Triton Inference Server",
            f"sum it up with Triton's trace_summary.py, or {_RECORD} in the model",
        ),
    ),
    (
        (b"speedscope.app/file-format-schema",),
        _Kind("a profile for speedscope", f"open it at speedscope.app, or {_RECORD}"),
    ),
    (
        (b'"nodes"', b'"schema"'),
        _Kind("an execution trace of torch (ExecutionTraceObserver), which has no times", _RECORD),
    ),
)
_OF_A_TRACE: Final = (b'"traceEvents"', b'"ph"')
_SQLITE: Final = b"SQLite format 3\x00"
_ZIP: Final = b"PK\x03\x04"


def refuse_foreign_files(paths: Sequence[Path]) -> None:
    """Refuse paths that are all known files of something else, with what they are and what to do.

    Raises:
        UsageError: They are.
    """
    kinds = [_kind(path) for path in paths]
    first = next(iter(kinds), None)
    if first is not None and None not in kinds:
        what, remedy = first
        raise UsageError(f"{paths[0]} {'holds' if paths[0].is_dir() else 'is'} {what}, no trace", remedy)


def _kind(path: Path) -> _Kind | None:
    if path.is_dir():
        return _kind_of_directory(path)
    if is_dump(path):
        # One dump shows little: the others are beside it.
        return _dump(path.parent, "a Flight Recorder dump (a rank's record of its collectives)")
    # Reading takes from a pipe what the next reader needs.
    if not path.is_file():
        return None
    if named := next((kind for ends, kind in _BY_NAME if path.name.endswith(ends)), None):
        return named
    if ".tfevents." in path.name:
        return _TENSORBOARD
    try:
        with path.open("rb") as file:
            head = untrusted_files.decompressed_head(file, _HEAD_BYTES)
    except (OSError, TorchperfdError):
        return None
    return _kind_of_content(path, head)


def _kind_of_directory(path: Path) -> _Kind | None:
    try:
        files = sorted(each for each in path.iterdir() if each.is_file())
    except OSError:
        return None
    is_of_dumps = any(map(is_dump, files[:_MAX_LOOKED_INTO]))
    return (
        _dump(path, "Flight Recorder dumps: each rank's record of its collectives") if is_of_dumps else None
    )


def _dump(folder: Path, what: str) -> _Kind:
    return _Kind(what, f"`torchperfd stacks --from {folder}` names the rank that the others waited for")


def _kind_of_content(path: Path, head: bytes) -> _Kind | None:
    if found := next((kind for begin, kind in _BY_BEGIN if head.startswith(begin)), None):
        return found
    if head.startswith(_SQLITE):
        is_nsys = "nsys" in path.name.lower() or path.suffix == ".sqlite"
        return _Kind(
            "a SQLite database, such as an export of Nsight Systems", _NSIGHT if is_nsys else _RECORD
        )
    if head.startswith(_ZIP):
        return _kind_of_archive(path)
    if any(mark in head for mark in _OF_A_TRACE):
        return None
    return next((kind for marks, kind in _BY_CONTENT if all(mark in head for mark in marks)), None)


def _kind_of_archive(path: Path) -> _Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError):
        names = []
    if any(name.endswith("/data.pkl") or name == "data.pkl" for name in names):
        return _CHECKPOINT
    return _Kind("a zip archive", "extract it first, and name the trace in it")
