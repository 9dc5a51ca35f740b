"""Finds the trace files of ranks, and reads their bytes, plain or compressed, in bounded pieces.

The rank of a file is the one that the file contains, or else the one in its name or its place among names.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

from torchperfd_daemon import untrusted_files
from torchperfd_daemon.analysis import decoding, kineto
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError, explained
from torchperfd_daemon.object_store import AnyPath

MAX_BYTES: Final = 8 << 30
_PIECE: Final = 1 << 19


class TraceFile:
    """One file or object, read once.

    Args:
        max_bytes: The most uncompressed bytes to hand out; a bigger file is refused, not cut.

    Attributes:
        size: Bytes as stored, known once the first piece is out; 0 for a pipe.
        broken: The compression broke off before the file's end, known once the last piece is out.
    """

    def __init__(self, path: AnyPath, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.size = 0
        self.broken = False
        self._max_bytes = max_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the uncompressed contents, half a mebibyte at a time at most.

        Raises:
            NoSuchTargetError: There is no such file.
            TorchperfdError: The file is empty, cannot be read or decompressed, or is too big.
        """
        total = 0
        try:
            with self.path.open("rb") as raw:
                self.size = _size(raw) if raw.seekable() else 0
                for piece in untrusted_files.decompressed_pieces(raw, _PIECE):
                    total += len(piece)
                    if total > self._max_bytes:
                        raise TorchperfdError(
                            f"{self.path} holds more than {self._max_bytes:,} bytes of trace",
                            "capture fewer steps or record less",
                        )
                    yield piece
        except untrusted_files.BrokenCompressionError:
            self.broken = True
        except FileNotFoundError:
            raise NoSuchTargetError(f"there is no trace at {self.path}") from None
        except OSError as error:
            raise TorchperfdError(f"cannot read {self.path}: {error.strerror or error}") from None
        if not total and not self.broken:
            raise TorchperfdError(
                f"{self.path} is empty", "capture again: the export was cut off or the disk was full"
            )


def _size(file: BinaryIO) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


RANK_IN_NAME: Final = re.compile(r"(?<![a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_CAPTURED: Final = re.compile(r"rank(\d{1,9})\.json(?:\.gz)?")
_CAPTURES_MANIFEST: Final = "manifest.json"
_JSON: Final = re.compile(r".*\.json(?:\.gz)?", re.IGNORECASE | re.DOTALL)
# A file of such a name is a trace even if it is damaged: then it is named as a rank that is missing.
_NAMED_TRACE: Final = re.compile(r"trace|rank", re.IGNORECASE)
# The suffixes of our own files beside traces, and of others'.
_NO_TRACE: Final = re.compile(r"manifest|analysis\.json", re.IGNORECASE)
# "rank-0.json", "dp0_pp0_tp1_rank1.1712.pt.trace.json.gz", "1719041535.6-TP-0.trace.json.gz".
_RANKS_IN_NAMES: Final = (
    RANK_IN_NAME,
    re.compile(r"(?<![a-z])tp[-_](\d{1,9})(?!\d)(?!.*(?:dp|pp|ep)[-_]?\d)", re.IGNORECASE),
)
# torch's tensorboard_trace_handler puts the time of each export into its name.
_WRITTEN_AT: Final = re.compile(r"\.(\d{10,20})\.pt\.trace\.json")
_TAIL_BYTES: Final = 1 << 16
_MAX_LISTED: Final = 4
_MAX_LOOKS: Final = 8


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's trace; the rank is None if it is unknown."""

    rank: int | None
    path: AnyPath


@dataclass(frozen=True, slots=True)
class _Found:
    """A file, the rank in its contents, and the rank in its name."""

    path: AnyPath
    own: int | None
    named: int | None

    @property
    def rank(self) -> int | None:
        return self.named if self.own is None else self.own


def rank_files(
    paths: AnyPath | Sequence[AnyPath], note: Callable[[str], object] = lambda _line: None
) -> list[RankFile]:
    """Return the trace files meant by files and directories, or objects and prefixes, in order of rank.

    A directory may contain other files. Of two files of one rank in it, the newest counts. Files without a
    rank are numbered in the order of their names, unless there is only one file; if other files of the
    directory have a rank, those without are left out.

    Raises:
        NoSuchTargetError: A directory contains no trace.
        TorchperfdError: A directory cannot be read.
        UsageError: Two of the named files are of one rank.
    """
    asked_for = list(paths) if isinstance(paths, Sequence) else [paths]
    named = [path for path in asked_for if not path.is_dir()]
    found = [each for path in named if (each := _looked_into(path))]
    for path in asked_for:
        if path.is_dir():
            found += _of_known_rank(_in_directory(path), note)
    found = _one_for_each_rank(_named_apart(found), named, note)
    if len(found) == 1:
        return [RankFile(found[0].rank, found[0].path)]
    return sorted(_numbered(found, note), key=lambda file: -1 if file.rank is None else file.rank)


def _in_directory(path: AnyPath) -> list[_Found]:
    with explained(f"cannot read {path}"):
        entries = sorted(path.iterdir(), key=_natural)
    if any(each.name == _CAPTURES_MANIFEST for each in entries):
        captured = [
            _Found(each, None, int(match[1])) for each in entries if (match := _CAPTURED.fullmatch(each.name))
        ]
        if captured:
            return captured
    files = [
        each
        for each in entries
        if _JSON.fullmatch(each.name) and not _NO_TRACE.search(each.name) and _is_file(each)
    ]
    # Several at a time: each look at an object waits for the network.
    with ThreadPoolExecutor(_MAX_LOOKS) as pool:
        looks = pool.map(
            lambda each: _looked_into(each, only_traces=not _NAMED_TRACE.search(each.name)), files
        )
        found = [each for each in looks if each]
    if not found:
        raise NoSuchTargetError(f"{path} holds no trace (.json or .json.gz)", "name a trace file")
    return found


def _of_known_rank(found: list[_Found], say: Callable[[str], object]) -> list[_Found]:
    """Return the files of a directory that have a rank, or all if none has."""
    known = [each for each in found if each.rank is not None]
    if known and (others := [each.path.name for each in found if each.rank is None]):
        say(f"left out, since others say their rank: {_listed(others)}")
    return known or found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _is_file(path: AnyPath) -> bool:
    """Return whether it can be read to its end, unlike a pipe."""
    try:
        return path.is_file()
    except OSError:
        return False


def _looked_into(path: AnyPath, *, only_traces: bool = False) -> _Found | None:
    """Return a file's header; None for a file that is not a trace, if only traces are wanted."""
    named = next((int(match[1]) for each in _RANKS_IN_NAMES if (match := each.search(path.name))), None)
    own, is_trace = None, False
    try:
        header = kineto.peek(TraceFile(path).pieces())
    except TorchperfdError:
        header = None
    if header is not None:
        is_trace = True
        own = header.distributed.rank if header.distributed else _rank_at_the_end(path)
    if only_traces and not is_trace:
        return None
    return _Found(path, own if own is not None and own >= 0 else None, named)


def _rank_at_the_end(path: AnyPath) -> int | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(file) - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
    except OSError:
        return None
    distributed = decoding.objects_in(tail, ("distributedInfo",)).get("distributedInfo")
    return decoding.whole_number(distributed.get("rank")) if isinstance(distributed, dict) else None


def _named_apart(found: Iterable[_Found]) -> list[_Found]:
    """Return the files; files of one rank whose names have different ranks get these."""
    files = list(found)
    by_own: defaultdict[int, list[_Found]] = defaultdict(list)
    for each in files:
        if each.own is not None:
            by_own[each.own].append(each)
    mistaken = {
        own
        for own, those in by_own.items()
        if None not in (names := [each.named for each in those]) and len(set(names)) == len(names) > 1
    }
    return [replace(each, own=None) if each.own in mistaken else each for each in files]


def _one_for_each_rank(
    found: Sequence[_Found], named: Sequence[AnyPath], say: Callable[[str], object]
) -> list[_Found]:
    kept = [each for each in found if each.rank is None]
    counts = Counter(each.rank for each in found if each.rank is not None)
    for rank, count in counts.items():
        those = sorted((each for each in found if each.rank == rank), key=lambda each: _age(each.path))
        kept.append(those[-1])
        if count == 1:
            continue
        both = [each.path.name for each in those if each.path in named]
        if len(both) > 1:
            raise UsageError(
                f"{both[0]} and {both[1]} are both of rank {rank}", "name one of them, or compare them"
            )
        older = [each for each in those[:-1] if _stem(each.path) != _stem(those[-1].path)]
        if older:
            say(f"rank {rank} has {len(older) + 1} traces; the newest counts: {those[-1].path.name}")
    return kept


def _numbered(found: Sequence[_Found], say: Callable[[str], object]) -> list[RankFile]:
    """Return the files by rank; files of unknown rank get the free numbers."""
    known = [RankFile(each.rank, each.path) for each in found if each.rank is not None]
    unknown = sorted((each.path for each in found if each.rank is None), key=_natural)
    taken = {file.rank for file in known}
    free = (rank for rank in range(len(found)) if rank not in taken)
    numbered = [RankFile(rank, path) for path, rank in zip(unknown, free, strict=False)]
    if numbered:
        listed = _listed([f"{file.rank} = {file.path.name}" for file in numbered])
        say(f"these do not say their rank and are numbered by name: {listed}")
    return known + numbered


def _age(path: AnyPath) -> tuple[int, tuple[tuple[int, int | str], ...], bool]:
    """Return the sort key of a rank's files, the newest last; a plain file sorts after a compressed one."""
    written = _WRITTEN_AT.search(path.name)
    return int(written[1]) if written else 0, _natural(_stem(path)), not path.name.endswith(".gz")


def _stem(path: AnyPath) -> str:
    # While a file is being compressed both forms exist; the plain one is the complete one.
    return str(path).removesuffix(".gz")


def _natural(path: AnyPath | str) -> tuple[tuple[int, int | str], ...]:
    """Return the sort key of natural order: step2 before step10."""
    parts = re.split(r"(\d+)", str(path))
    return tuple((0, int(part)) if part.isascii() and part.isdigit() else (1, part) for part in parts)
