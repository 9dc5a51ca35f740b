"""Finds the Flight Recorder dumps among files and directories, and the rank of each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, explained
from torchperfd_daemon.flight_recorder.dump import MAX_RANKS, Dump, is_dump, load

# torch's files are named nccl_trace_rank_3; others add a suffix, such as rank3.json.gz.
_RANK: Final = re.compile(r"(\d{1,7})(?:\.[A-Za-z]\w*)*$")
# A file of such a name is a dump even if it is damaged: then it is named as one that is missing.
_NAMED_SO: Final = re.compile(r"(?:nccl|fr|flight|comm_lib)\w*trace|rank[-_.]?\d", re.IGNORECASE)
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
        names = {_RANK.sub("", each.name) for each in dumps}
        found += [
            each
            for each in files
            if each in dumps or (_NAMED_SO.search(each.name) and _RANK.sub("", each.name) in names)
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
        rank = _rank(dump)
        if rank is None:
            failed.append((path, f"{path} has no rank, neither in its name nor in its contents"))
        elif rank in dumps:
            failed.append((path, f"{dumps[rank].path.name} and {path.name} are both of rank {rank}"))
        else:
            dumps[rank] = dump
    if not dumps:
        raise errors[0] if errors else TorchperfdError(failed[0][1], "name each file by its rank: rank_0")
    return Found({rank: dumps[rank] for rank in sorted(dumps)}, tuple(failed))


def _rank(dump: Dump) -> int | None:
    """Return the rank by the file's name, as torch's own tool does; by the contents without one."""
    match = _RANK.search(dump.path.name)
    named = int(match[1]) if match else None
    return named if named is not None and named < MAX_RANKS else dump.rank
