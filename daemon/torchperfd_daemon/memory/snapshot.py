"""Finds and reads what ``torch.cuda.memory._dump_snapshot`` writes of torch's CUDA allocator."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, TypeGuard

from torchperfd_daemon import analysis, untrusted_files
from torchperfd_daemon.analysis.trace_files import RANK_IN_NAME
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError, explained
from torchperfd_daemon.memory import model
from torchperfd_daemon.memory.model import (
    Block,
    Event,
    FailedAllocation,
    Frame,
    History,
    Peak,
    Segment,
    Snapshot,
    Stack,
    State,
)
from torchperfd_daemon.object_store import AnyPath
from torchperfd_daemon.untrusted_files import contents, is_pickle, load_plain

_NAMED_SO: Final = re.compile(r".*\.(?:pickle|pkl)(?:\.(?:gz|xz|zst))?", re.DOTALL)
_HEAD_BYTES: Final = 64
_TRACE_BEGINS: Final = (b"{", b"[")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One rank's snapshot; the rank is None if its name does not have one."""

    rank: int | None
    path: AnyPath


def find_snapshots(paths: Sequence[AnyPath], note: Callable[[str], object]) -> list[SnapshotFile]:
    """Return the memory snapshots meant by files and directories, by rank; empty if all are something else.

    A file counts by its content, or by its name if it holds neither a pickle nor a trace. A directory counts
    if it holds snapshots and no traces; beside traces, ``note`` gets a line about them.

    Raises:
        TorchperfdError: A directory cannot be read.
        UsageError: Some of the paths are snapshots and some are not.
    """
    found, others = list[AnyPath](), list[AnyPath]()
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


def _in_directory(path: AnyPath, note: Callable[[str], object]) -> list[AnyPath]:
    with explained(f"cannot read {path}"):
        found = [each for each in path.iterdir() if _NAMED_SO.fullmatch(each.name) and _is_snapshot(each)]
    if found and _holds_traces(path):
        note(f"left out {len(found)} memory snapshots beside the traces in {path}; name one to see it")
        return []
    return found


def _holds_traces(path: AnyPath) -> bool:
    try:
        return bool(analysis.rank_files(path))
    except NoSuchTargetError:
        return False


def _is_snapshot(path: AnyPath) -> bool:
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


def _rank(path: AnyPath) -> int | None:
    match = RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


MAX_BYTES: Final = 2 << 30
"""Bytes after decompression. A larger file is refused: its objects would take ten times as much memory."""
_SMALL_SEGMENT: Final = 2 << 20
_STATES: Final = {
    "active_allocated": State.ALLOCATED,
    "active_awaiting_free": State.AWAITING_FREE,
    "active_pending_free": State.AWAITING_FREE,
    "inactive": State.FREE,
}
# Settings whose default is neither 0 nor empty. torch writes "no limit" as -1.
_DEFAULTS: Final = {"max_split_size": -1, "pinned_num_register_threads": 1}
_OF_TENSORS: Final = frozenset({model.ALLOCATED, model.RELEASE_REQUESTED, *model.RELEASED})
_MAX_LETTERS: Final = 4096
_MAX_SETTINGS: Final = 64


def load(path: AnyPath, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Return the snapshot in a file.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: It is too large, cannot be read, or is no memory snapshot. The message has the path.
    """
    data = contents(path, "memory snapshot", max_bytes, "record fewer events: max_entries of torch")
    try:
        if not is_pickle(data[:2]):
            raise TorchperfdError(_unlike(data), "name a file of `torch.cuda.memory._dump_snapshot`")
        return _Reader(path, len(data)).read(load_plain(data))
    except TorchperfdError as error:
        raise TorchperfdError(f"{path}: {error.problem}", error.remedy) from error


def _unlike(data: bytes) -> str:
    if not data:
        return "the file is empty"
    if data.lstrip()[:1] in (b"{", b"["):
        return "no memory snapshot but JSON; a trace has a name that ends in .json"
    return "no memory snapshot"


class _Reader:
    """Turns the plain data of one file into a `Snapshot`.

    Args:
        size: Bytes of the file.
    """

    def __init__(self, path: AnyPath, size: int) -> None:
        self._path = path
        self._size = size
        self._left = size
        self._skipped = 0
        # By the identity of the file's own lists and dicts, which it shares between blocks.
        self._stacks: dict[int, Stack] = {}
        self._frames: dict[int, Frame] = {}

    def read(self, data: object) -> Snapshot:
        """Return the snapshot.

        Raises:
            TorchperfdError: The data is that of something else.
        """
        whole = data if isinstance(data, dict) else {"segments": data}
        segments = whole.get("segments")
        if not isinstance(segments, list) or (segments and not any(map(_is_segment, segments))):
            raise TorchperfdError(
                "no memory snapshot: it has no segments", "name a file of `torch.cuda.memory._dump_snapshot`"
            )
        read = tuple(filter(None, map(self._segment, self._each(segments))))
        histories, failures = self._histories(whole.get("device_traces"))
        return Snapshot(
            path=self._path,
            file_size=self._size,
            segments=self._with_origins(read, histories),
            failures=tuple(failures),
            peaks=dict(_peaks(read, histories)),
            settings=dict(_changed(whole.get("allocator_settings"))),
            skipped=self._skipped,
        )

    def _each(self, items: object) -> Iterable[Any]:
        """Return the items of a list; none of anything else.

        A file can refer to one list many times, and such lists within each other would take forever. A list
        that was written by torch has fewer items than bytes.
        """
        if not isinstance(items, list):
            return ()
        self._left -= len(items)
        if self._left < 0:
            raise TorchperfdError("the snapshot refers to the same data again and again", "write it again")
        return items

    def _segment(self, raw: object) -> Segment | None:
        if not _is_segment(raw):
            self._skipped += 1
            return None
        blocks = tuple(self._blocks(raw))
        if not blocks:
            blocks = tuple(_blocks_of_totals(raw))
        size = max(_size(raw.get("total_size")) or 0, sum(block.size for block in blocks))
        kind = raw.get("segment_type")
        pool = raw.get("segment_pool_id")
        return Segment(
            device=_size(raw.get("device")) or 0,
            size=size,
            is_small=kind == "small" if kind in ("small", "large") else size <= _SMALL_SEGMENT,
            is_expandable=raw.get("is_expandable") is True,
            is_private=isinstance(pool, tuple) and any(pool),
            blocks=blocks,
        )

    def _blocks(self, raw: dict[Any, Any]) -> Iterator[Block]:
        # Until torch 2.0 a block had no address; blocks touch each other.
        following = _size(raw.get("address"))
        for each in self._each(raw.get("blocks")):
            if (block := self._block(each, following)) is not None:
                following = None if block.address is None else block.address + block.size
                yield block
            else:
                following = None

    def _block(self, raw: object, address: int | None) -> Block | None:
        size = _size(raw.get("size")) if isinstance(raw, dict) else None
        state = raw.get("state") if isinstance(raw, dict) else None
        if not isinstance(raw, dict) or size is None or not isinstance(state, str) or state not in _STATES:
            self._skipped += 1
            return None
        # Until torch 2.0 the size that was asked for and the stack were in a list beside the block.
        history = raw.get("history")
        past = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}
        requested = _size(raw.get("requested_size", past.get("real_size")))
        return Block(
            size=size,
            requested=size if requested is None else min(requested, size),
            state=_STATES[state],
            stack=self._stack(raw.get("frames", past.get("frames"))),
            address=_size(raw.get("address", past.get("addr", address))),
        )

    def _stack(self, raw: object) -> Stack:
        if not isinstance(raw, list):
            return ()
        known = self._stacks.get(id(raw))
        if known is None:
            known = tuple(self._frame(frame) for frame in self._each(raw) if isinstance(frame, dict))
            self._stacks[id(raw)] = known
        return known

    def _frame(self, raw: dict[Any, Any]) -> Frame:
        known = self._frames.get(id(raw))
        if known is None:
            known = Frame(_text(raw.get("filename")), _size(raw.get("line")) or 0, _text(raw.get("name")))
            self._frames[id(raw)] = known
        return known

    def _histories(self, traces: object) -> tuple[dict[int, History], list[FailedAllocation]]:
        """Return what was allocated and released on each device, and the allocations that failed."""
        histories, failures = dict[int, History](), list[FailedAllocation]()
        for device, events in enumerate(self._each(traces)):
            histories[device] = History(self._events(device, events, failures), self._stack)
        return histories, failures

    def _events(self, device: int, events: object, failures: list[FailedAllocation]) -> Iterator[Event]:
        """Yield the allocations and releases of a device, and add those that failed to ``failures``."""
        for event in self._each(events):
            action = event.get("action") if isinstance(event, dict) else None
            if isinstance(action, str) and action in _OF_TENSORS:
                address, size = _size(event.get("addr")), _size(event.get("size"))
                if address is None or size is None:
                    self._skipped += 1
                else:
                    yield Event(action, address, size, _size(event.get("time_us")), event.get("frames"))
            elif action == "oom" and (size := _size(event.get("size"))) is not None:
                free, time = _size(event.get("device_free")), _size(event.get("time_us"))
                failures.append(FailedAllocation(device, size, free, time, self._stack(event.get("frames"))))
            elif action == "oom" or not isinstance(event, dict):
                self._skipped += 1

    def _with_origins(
        self, segments: tuple[Segment, ...], histories: dict[int, History]
    ) -> tuple[Segment, ...]:
        """Mark the blocks without a stack that were allocated before recording began."""
        has_events = any(each.events for each in histories.values())
        if not has_events and not any(block.stack for segment in segments for block in segment.blocks):
            return segments
        return tuple(
            replace(
                segment,
                blocks=tuple(
                    replace(block, is_earlier=True)
                    if not block.stack
                    and block.state is not State.FREE
                    and not (segment.device in histories and histories[segment.device].allocated(block))
                    else block
                    for block in segment.blocks
                ),
            )
            for segment in segments
        )


def _peaks(segments: Iterable[Segment], histories: dict[int, History]) -> Iterator[tuple[int, Peak]]:
    blocks = defaultdict[int, list[Block]](list)
    for segment in segments:
        blocks[segment.device] += segment.blocks
    for device, each in histories.items():
        if (peak := each.peak(blocks[device])) is not None:
            yield device, peak


def _is_segment(raw: object) -> TypeGuard[dict[Any, Any]]:
    if not isinstance(raw, dict):
        return False
    return isinstance(raw.get("blocks"), list) or _size(raw.get("total_size")) is not None


def _blocks_of_totals(raw: dict[Any, Any]) -> Iterator[Block]:
    """Yield what is known of a segment whose blocks are not in the file."""
    allocated = _size(raw.get("allocated_size")) or 0
    active = max(_size(raw.get("active_size")) or 0, allocated)
    if allocated:
        yield Block(allocated, min(_size(raw.get("requested_size")) or allocated, allocated), State.ALLOCATED)
    if not active and (free := _size(raw.get("total_size"))):
        yield Block(free, free, State.FREE)
    if active > allocated:
        yield Block(active - allocated, active - allocated, State.AWAITING_FREE)


def _changed(settings: object) -> Iterator[tuple[str, str]]:
    """Yield each setting of the allocator that is not torch's default, as text."""
    if not isinstance(settings, dict):
        return
    for name, value in islice(settings.items(), _MAX_SETTINGS):
        if isinstance(value, dict):
            parts = islice(value.items(), _MAX_SETTINGS)
            value = ",".join(f"{_text(key)}:{each}" for key, each in parts if isinstance(each, int) and each)
        is_plain = isinstance(name, str) and isinstance(value, (int, float, str))
        if is_plain and value and value != _DEFAULTS.get(name):
            yield _text(name), _text(str(value))


def _size(value: object) -> int | None:
    """Return a number of bytes, a line or a time; None for anything that is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _text(value: object) -> str:
    return value[:_MAX_LETTERS] if isinstance(value, str) else ""
