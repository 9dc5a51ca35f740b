"""Finds and reads Flight Recorder dumps: pickles of plain data, as torch writes them, or the same as JSON.

Releases of torch differ in the fields, so all but the collectives themselves may be absent.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.model.formatting import one_line
from torchperfd_daemon import untrusted_files
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, explained
from torchperfd_daemon.object_store import AnyPath
from torchperfd_daemon.stacks.model import Frame
from torchperfd_daemon.untrusted_files import DamagedError, contents, decode, is_pickle, load_plain

MAX_BYTES: Final = 256 << 20
"""Bytes after decompression. torch keeps 2,000 collectives, of about a kilobyte each."""
MAX_RANKS: Final = 1 << 20
_HEAD_BYTES: Final = 1 << 16
_MARKS: Final = (b"collective_seq_id", b"pg_config", b"pg_status", b"nccl_comm_state", b"comm_lib_version")
# A memory snapshot, and a trace: its header has the process groups as well.
_OTHERS: Final = (b"segments", b"device_traces", b"traceEvents", b"schemaVersion")
_MAX_LETTERS: Final = 200
_MAX_SIZES: Final = 4
_WRITTEN_BY: Final = "torch's Flight Recorder"
_NUMBER: Final = re.compile(r"\d{1,7}")
_LIBRARY: Final = re.compile(r".*/(?:(?:site|dist)-packages|lib/python3[.\d]*t?)/")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank has entered.

    Attributes:
        number: In its process group, as the file counts: torch from 1, other writers from 0.
        sizes: Of its inputs, such as ``4x4, 10``.
        place: The line of the script that called it; None if unknown.
    """

    number: int
    name: str
    sizes: str
    has_ended: bool
    place: Frame | None


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's part in one process group.

    Attributes:
        members: The ranks of the group; empty if unknown.
        newest: The number of the newest collective that the rank has entered by the group's status; None if
            unknown. The record of an old one may be gone.
        calls: In the order of their numbers.
    """

    name: str
    description: str
    members: frozenset[int] = frozenset()
    newest: int | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Dump:
    """One file.

    Attributes:
        rank: By the contents; None if they do not have it.
        skipped: Entries that could not be read.
    """

    path: Path
    rank: int | None
    groups: tuple[Group, ...]
    skipped: int = 0


def is_dump(path: AnyPath) -> bool:
    """Return whether a file or an object begins like a dump, plain or compressed; a damaged one may."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = untrusted_files.decompressed_head(file, _HEAD_BYTES)
    except (OSError, TorchperfdError):
        return False
    is_possible = is_pickle(head) or head.lstrip().startswith(b"{")
    return (
        is_possible and any(mark in head for mark in _MARKS) and not any(other in head for other in _OTHERS)
    )


def load(path: Path) -> Dump:
    """Return the dump in a file.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: It is too large, cannot be read, or is no dump. The message has the path.
    """
    data = contents(path, "Flight Recorder dump", MAX_BYTES, "name a dump")
    try:
        return _Reader(path).read(_plain(data))
    except TorchperfdError as error:
        raise TorchperfdError(f"{path}: {error.problem}", error.remedy) from error


def _plain(data: bytes) -> object:
    if not data:
        raise TorchperfdError("the dump is empty", "the process ended while it was written")
    if is_pickle(data[:2]):
        return load_plain(data, _WRITTEN_BY)
    try:
        return decode(data, object)
    except DamagedError:
        raise TorchperfdError(
            "the dump is damaged or cut off: neither a pickle nor JSON",
            "the process ended while it was written; leave the file out",
        ) from None


class _Reader:
    """Turns the plain data of one file into a `Dump`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped = 0

    def read(self, data: object) -> Dump:
        """Return the dump.

        Raises:
            TorchperfdError: The data is that of something else.
        """
        if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
            raise TorchperfdError("no Flight Recorder dump: it has no entries", "name a dump of torch")
        groups = self._groups(data)
        rank = _whole(data.get("rank"))
        return Dump(self._path, rank if rank is None or rank < MAX_RANKS else None, groups, self._skipped)

    def _groups(self, data: Mapping[Any, Any]) -> tuple[Group, ...]:
        calls: dict[str, list[Call]] = {}
        descriptions: dict[str, str] = {}
        newest: dict[str, int] = {}
        statuses = _dict(data.get("pg_status"))
        for entry in data["entries"]:
            found = _call(entry)
            if found is None:
                # Messages between two ranks are counted for themselves.
                self._skipped += not (isinstance(entry, dict) and entry.get("is_p2p") is True)
                continue
            (name, description), call = found
            calls.setdefault(name, []).append(call)
            descriptions[name] = description
            status = _dict(statuses.get(str(entry.get("pg_id")), statuses.get(entry.get("pg_id"))))
            if (number := _whole(status.get("last_enqueued_collective"))) is not None:
                newest[name] = number
        for key, raw in _dict(data.get("pg_config")).items():
            config = _dict(raw)
            name = _text(config.get("name", key))
            if name and name not in calls:
                calls[name] = []
                # Without entries the status may have the group by its name.
                number = _whole(_dict(statuses.get(key)).get("last_enqueued_collective"))
                newest[name] = 0 if number is None else number
            descriptions.setdefault(name, _text(config.get("desc")))
        members = {
            _text(_dict(raw).get("name", key)): _ranks(_dict(raw).get("ranks"))
            for key, raw in _dict(data.get("pg_config")).items()
        }
        return tuple(
            Group(
                name,
                descriptions.get(name, ""),
                members.get(name, frozenset()),
                newest.get(name),
                tuple(sorted(those, key=lambda call: call.number)),
            )
            for name, those in calls.items()
        )


def _call(entry: object) -> tuple[tuple[str, str], Call] | None:
    """Return the names of the group and the collective of an entry; None for anything else."""
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    group, number = entry.get("process_group"), _whole(entry.get("collective_seq_id"))
    name = _text(entry.get("profiling_name")).rpartition(":")[2]
    if number is None or not name or not isinstance(group, (list, tuple)) or len(group) != 2:
        return None
    has_ended = entry.get("retired") is True or entry.get("state") == "completed"
    names = _text(str(group[0])), _text(str(group[1]))
    return names, Call(number, name, _sizes(entry.get("input_sizes")), has_ended, _place(entry.get("frames")))


def _sizes(raw: object) -> str:
    tensors = [each for each in raw if isinstance(each, (list, tuple))] if isinstance(raw, list) else []
    shown = ["x".join(_text(str(size)) for size in each[:8]) or "1" for each in tensors[:_MAX_SIZES]]
    return ", ".join(shown) + (", …" if len(tensors) > _MAX_SIZES else "")


def _place(raw: object) -> Frame | None:
    """Return the innermost frame outside of Python and installed packages; the innermost without one."""
    frames = list(_frames(raw if isinstance(raw, list) else ()))
    return next((frame for frame in frames if not _LIBRARY.match(frame.file)), next(iter(frames), None))


def _frames(raw: Iterable[object]) -> Iterator[Frame]:
    for each in raw:
        if isinstance(each, dict):
            yield Frame(_text(each.get("filename")), _whole(each.get("line")) or 0, _text(each.get("name")))


def _ranks(raw: object) -> frozenset[int]:
    """Return the ranks of a group, which torch writes as the text ``[0, 1, 2]``."""
    text = raw if isinstance(raw, str) else " ".join(map(str, raw)) if isinstance(raw, (list, tuple)) else ""
    return frozenset(rank for each in _NUMBER.findall(text) if (rank := int(each)) < MAX_RANKS)


def _dict(raw: object) -> Mapping[Any, Any]:
    return raw if isinstance(raw, dict) else {}


def _whole(raw: object) -> int | None:
    """Return a number that is not negative; torch's JSON has some as text."""
    if isinstance(raw, str) and raw.isascii() and raw.isdecimal() and len(raw) < 19:
        raw = int(raw)
    is_one = isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 1 << 62
    return raw if is_one else None  # type: ignore[return-value]


def _text(raw: object) -> str:
    return one_line(raw, _MAX_LETTERS) if isinstance(raw, str) else ""


# torch's files are named nccl_trace_rank_3; others add a suffix, such as rank3.json.gz.
_RANK_IN_NAME: Final = re.compile(r"(\d{1,7})(?:\.[A-Za-z]\w*)*$")
# A file of such a name is a dump even if it is damaged: then it is named as one that is missing.
_DUMP_NAME: Final = re.compile(r"(?:nccl|fr|flight|comm_lib)\w*trace|rank[-_.]?\d", re.IGNORECASE)
_MAX_FILES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """The dumps of a job.

    Attributes:
        dumps: By rank.
        failed: Files that could not be read, or whose rank is unknown or that of another file, each with the
            reason.
    """

    dumps: dict[int, Dump]
    failed: tuple[tuple[Path, str], ...]


def find_dumps(paths: Sequence[Path]) -> list[Path]:
    """Return the files meant by files and directories that are dumps, in the order of their names.

    Of a directory those count that begin like a dump, and if there are such, those with the name of one.

    Raises:
        TorchperfdError: A directory cannot be read.
    """
    found = list[Path]()
    for path in paths:
        if not path.is_dir():
            found += [path] if is_dump(path) else []
            continue
        with explained(f"cannot read {path}"):
            files = sorted(each for each in path.iterdir() if each.is_file())[:_MAX_FILES]
        dumps = [each for each in files if is_dump(each)]
        names = {_RANK_IN_NAME.sub("", each.name) for each in dumps}
        found += [
            each
            for each in files
            if each in dumps or (_DUMP_NAME.search(each.name) and _RANK_IN_NAME.sub("", each.name) in names)
        ]
    return list(dict.fromkeys(found))


def read_dumps(paths: Sequence[Path]) -> Found:
    """Return the dumps meant by files and directories.

    Raises:
        NoSuchTargetError: There is none.
        TorchperfdError: None could be read.
    """
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise NoSuchTargetError(f"there is no file or directory {missing}")
    # A file that was named is read, so that the message says what is wrong with it.
    files = list(dict.fromkeys([*find_dumps(paths), *(path for path in paths if not path.is_dir())]))
    if not files:
        raise NoSuchTargetError(
            f"{paths[0]} holds no Flight Recorder dump",
            "name the directory of TORCH_NCCL_DEBUG_INFO_TEMP_FILE, with files such as nccl_trace_rank_0",
        )
    dumps, failed = dict[int, Dump](), list[tuple[Path, str]]()
    errors = list[TorchperfdError]()
    for path in files:
        try:
            dump = load(path)
        except TorchperfdError as error:
            errors.append(error)
            failed.append((path, str(error)))
            continue
        rank = _rank_of_dump(dump)
        if rank is None:
            failed.append((path, f"{path} has no rank, neither in its name nor in its contents"))
        elif rank in dumps:
            failed.append((path, f"{dumps[rank].path.name} and {path.name} are both of rank {rank}"))
        else:
            dumps[rank] = dump
    if not dumps:
        raise errors[0] if errors else TorchperfdError(failed[0][1], "name each file by its rank: rank_0")
    return Found({rank: dumps[rank] for rank in sorted(dumps)}, tuple(failed))


def _rank_of_dump(dump: Dump) -> int | None:
    """Return the rank by the file's name, as torch's own tool does; by the contents without one."""
    match = _RANK_IN_NAME.search(dump.path.name)
    named = int(match[1]) if match else None
    return named if named is not None and named < MAX_RANKS else dump.rank
