"""Traces that a command reads: finding one, its capture, and warnings about damage.

There is one sentence for each kind of file that is easily taken for a trace.
"""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_cli.commands._capture_catalog import DaemonCatalog, open_catalog
from torchperfd_cli.commands._output import note
from torchperfd_cli.commands._scope import known_name
from torchperfd_daemon import analysis, object_store, untrusted_files
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.folder import is_file_name
from torchperfd_daemon.captures.manifest import FILE_NAME, CaptureRecord
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.object_store import AnyPath, ObjectPath
from torchperfd_daemon.stacks.flight_recorder_dumps import is_dump

# The analyser uses no linear algebra, and numpy's starts a thread for every core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_HEAD_BYTES: Final = 1 << 13
_MAX_LOOKED_INTO: Final = 4
# A rank takes less than a KiB.
_MAX_MANIFEST_BYTES: Final = 16 << 20
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


def refuse_foreign_files(paths: Sequence[AnyPath]) -> None:
    """Refuse paths that are all known files of something else, with what they are and what to do.

    Raises:
        UsageError: They are.
    """
    kinds = [_kind(path) for path in paths]
    first = next(iter(kinds), None)
    if first is not None and None not in kinds:
        what, remedy = first
        raise UsageError(f"{paths[0]} {'holds' if paths[0].is_dir() else 'is'} {what}, no trace", remedy)


def _kind(path: AnyPath) -> _Kind | None:
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


def _kind_of_directory(path: AnyPath) -> _Kind | None:
    try:
        files = sorted((each for each in path.iterdir() if each.is_file()), key=str)
    except OSError:
        return None
    is_of_dumps = any(map(is_dump, files[:_MAX_LOOKED_INTO]))
    return (
        _dump(path, "Flight Recorder dumps: each rank's record of its collectives") if is_of_dumps else None
    )


def _dump(folder: AnyPath, what: str) -> _Kind:
    return _Kind(what, f"`torchperfd stacks --from {folder}` names the rank that the others waited for")


def _kind_of_content(path: AnyPath, head: bytes) -> _Kind | None:
    if found := next((kind for begin, kind in _BY_BEGIN if head.startswith(begin)), None):
        return found
    if head.startswith(_SQLITE):
        is_nsys = "nsys" in path.name.lower() or path.name.endswith(".sqlite")
        return _Kind(
            "a SQLite database, such as an export of Nsight Systems", _NSIGHT if is_nsys else _RECORD
        )
    if head.startswith(_ZIP):
        return _kind_of_archive(path)
    if any(mark in head for mark in _OF_A_TRACE):
        return None
    return next((kind for marks, kind in _BY_CONTENT if all(mark in head for mark in marks)), None)


def _kind_of_archive(path: AnyPath) -> _Kind:
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError):
        names = []
    if any(name.endswith("/data.pkl") or name == "data.pkl" for name in names):
        return _CHECKPOINT
    return _Kind("a zip archive", "extract it first, and name the trace in it")


def capture_record(paths: Sequence[AnyPath]) -> CaptureRecord | None:
    """Return the capture that traces are of.

    None where they lie in no capture's folder, or in those of several, or where its manifest cannot be read.
    """
    folders = {_folder(path) for path in paths}
    if len(folders) != 1:
        return None
    (folder,) = folders
    if isinstance(folder, ObjectPath):
        return _uploaded_record(folder)
    try:
        found = Catalog(folder.parent).found(folder.name)
    except (TorchperfdError, OSError):
        return None
    return None if found is None else found.record


def _folder(path: AnyPath) -> AnyPath:
    folder = path if path.is_dir() else path.parent
    return folder if isinstance(folder, ObjectPath) else folder.resolve()


def _uploaded_record(folder: ObjectPath) -> CaptureRecord | None:
    try:
        document = untrusted_files.contents(folder / FILE_NAME, "manifest", _MAX_MANIFEST_BYTES, _RECORD)
        return untrusted_files.decode_clean(document, CaptureRecord)
    except (TorchperfdError, untrusted_files.DamagedError):
        return None


def with_lost_ranks(
    files: Sequence[analysis.RankFile], paths: Sequence[AnyPath], record: CaptureRecord | None
) -> list[analysis.RankFile]:
    """Return the files of a capture's folder, with those that its manifest names and that are not there."""
    if record is None or len(paths) != 1 or not paths[0].is_dir():
        return list(files)
    found = {file.rank for file in files}
    lost = [
        analysis.RankFile(each.rank, paths[0] / each.file)
        for each in record.ranks
        if each.rank not in found and each.file.startswith("rank") and is_file_name(each.file)
    ]
    return sorted((*files, *lost), key=lambda file: -1 if file.rank is None else file.rank)


def loader_advice(record: CaptureRecord | None) -> SettledAdvice | None:
    """Return what the run of a capture was advised on its loaders; None if the capture has no such advice."""
    settled = None if record is None else record.loader_advice
    return settled if settled is not None and settled.is_sound() else None


def capture_facts(record: CaptureRecord | None) -> dict[str, Any] | None:
    """Return run, job, nodes, versions and time of the capture that traces are of; times in Unix seconds."""
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


def find_trace(trace: str, captures_dir: Path | None) -> AnyPath:
    """Return the file or directory of an argument; one that is no URL and no path may be a capture's id."""
    if "://" in trace:
        return object_store.find(trace)
    path = Path(trace)
    if path.exists():
        return path
    catalog = open_catalog(captures_dir)
    if path.name == trace:
        trace = known_name(trace, catalog.ids(), "capture")
    try:
        folder = catalog.folder(trace)
    except NoSuchTargetError:
        return path
    if isinstance(catalog, DaemonCatalog):
        return catalog.fetched(trace) if trace in catalog.ids() else path
    return folder if folder.is_dir() else path


def decided(line: str) -> None:
    """Print an automatic decision on stderr."""
    note(f"torchperfd: {line}")


def warn(summary: analysis.Summary) -> None:
    """Print on stderr which parts of a trace could not be read."""
    if summary.damaged:
        at = f" at byte {place:,} of its text" if (place := summary.quality.reading.damaged_at) else ""
        decided(
            f"{summary.path} is cut off or damaged{at}; these are the {summary.events:,} events "
            f"that could be read, {summary.skipped:,} were broken"
        )
    elif summary.skipped:
        decided(f"{summary.path}: skipped {summary.skipped:,} broken events")
    if summary.quality.reading.more_exports:
        decided(f"{summary.path} holds another trace after the first; only that is read")
    if summary.quality.reading.has_impossible_times:
        decided(f"{summary.path} has impossible device times; `torchperfd analyze` lists them")
    if summary.others:
        decided(f"{summary.path} holds {len(summary.others) + 1} processes, each analysed by itself")
