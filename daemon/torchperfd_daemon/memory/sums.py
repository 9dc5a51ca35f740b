"""Adds up segments and their blocks, by the places in the code that allocated them. Sizes in bytes."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from torchperfd.model.formatting import one_line
from torchperfd_daemon.memory.model import Block, Frame, Holder, Segment, Stack, State

_LIBRARY_PATH: Final = re.compile(
    r"(?:^|.*/)(?:(?:site|dist)-packages/|lib/python3[.\d]*t?/|(?=(?:torch|torchperfd)/))", re.IGNORECASE
)
# C++ frames have no such name, nor has what Python freezes or torch generates (`<eval_with_key>.3`).
_PYTHON_FILE: Final = re.compile(r".*\.py|<ipython-input.*|<stdin>|<string>", re.DOTALL)
# Python's own start of a thread or program calls what allocates, and is never the place.
_STARTERS: Final = re.compile(r"(?:.*/)?(?:threading|runpy|_bootstrap)\.py")
_MAX_LETTERS: Final = 80

EARLIER: Final = "allocated before recording began (parameters?)"
NOT_RECORDED: Final = "no stack recorded"
NO_PYTHON: Final = "no Python frame (gradients, by the autograd thread?)"
_NO_CALLER: Final = "a C++ thread without a Python frame"

_OPERATOR: Final = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)\b")
# An overload follows the operator's name: mul_Tensor, sum_dim_IntList.
_OVERLOAD_SUFFIX: Final = re.compile(r"_[A-Z]\w*$")
_ONLY_ALLOCATES: Final = re.compile(
    r"(?:new_)?(?:_?empty|zeros|ones|full)(?:_\w+)?|_?resize_\w*|_?(?:to|clone|contiguous)(?:_copy|_dtype\w*)?"
)
_GRADIENT_NODE: Final = re.compile(r"\b(\w+?)Backward\d*(?:_apply_functional\b|::apply\b)")
_GRADIENT_FUNCTION: Final = re.compile(r"::(\w+?)_backward(?=\s*[(<]|::call|::redispatch|$)")
_GRADIENT_OF: Final = re.compile(r"_(?:tensor_)?(?:self|other|mat[12]|batch[12]|input|weight|bias|vec\d?)$")
_AUTOGRAD_THREAD: Final = re.compile(r"torch::autograd::(?:python::\w+|Engine)::\w*(?:thread|evaluate)")
# Frames of the recorder, the allocator, the dispatcher and the thread itself: they are on every such stack.
_TOOL_FRAMES: Final = re.compile(
    r"torch::unwind|CapturedTraceback|gather_with_cpp|Allocator|\bat::(?:\w+::)*_?(?:empty|zeros|new_empty)"
    r"|\bat::TensorBase at::detail|create_out|set_output|wrap_kernel_functor|KernelFunction|Dispatcher"
    r"|native_thread_routine|pthread|std::|__|start_thread|clone|^\?*$|c10::Storage|_PyEval|^_?Py[A-Z_]|^_start"
)


class Place(NamedTuple):
    """Where memory was allocated.

    Attributes:
        has_line: Whether the text names a line of Python, which a reader can look at.
    """

    text: str
    has_line: bool


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost Python frame outside of torch, Python and installed packages; None without one."""
    return next((frame for frame in stack if _is_python(frame) and not _in_library(frame)), None)


def place(stack: Stack, without: str = NOT_RECORDED) -> Place:
    """Return the user's line that allocated, and the line within a library that it called.

    Without a line of Python it is the operator whose gradient the autograd thread computed, or the operator.
    Frames of the recorder and the allocator are never the place.

    Args:
        without: The text if there is no stack: why.
    """
    if not stack:
        return Place(without, has_line=False)
    user = user_frame(stack)
    inner = next(
        (frame for frame in stack if _is_python(frame) and not _STARTERS.fullmatch(_path(frame))), None
    )
    if inner is None or (user is None and _is_gradient(stack)):
        return Place(one_line(_operator_text(stack), _MAX_LETTERS), has_line=False)
    if user is None or user == inner or inner not in stack[: stack.index(user)]:
        return Place(_frame_text(user or inner), has_line=True)
    return Place(f"{_frame_text(user)}, within {_frame_text(inner)}", has_line=True)


def place_text(stack: Stack) -> str:
    return place(stack).text


def _operator_text(stack: Stack) -> str:
    names = [frame.name for frame in stack]
    operators = [_without_overload(found[1]) for name in names if (found := _OPERATOR.search(name))]
    operator = next((each for each in operators if not _ONLY_ALLOCATES.fullmatch(each)), None)
    if any("torch::autograd::AccumulateGrad" in name for name in names):
        return "gradient of a parameter, kept in .grad (autograd thread)"
    if _is_gradient(stack):
        of = _gradient_of(names, operator)
        return f"gradient of {of} (autograd thread)" if of else "gradient (autograd thread)"
    if operator is not None or operators:
        return f"{operator or operators[0]} (C++, no Python frame)"
    # In the allocator's own frames there is nothing to look at.
    frame = next(
        (frame for frame in stack if not (_TOOL_FRAMES.search(frame.name) or _is_python(frame))), None
    )
    return _NO_CALLER if frame is None else _frame_text(frame)


def _is_gradient(stack: Iterable[Frame]) -> bool:
    return any(_AUTOGRAD_THREAD.search(frame.name) or _GRADIENT_NODE.search(frame.name) for frame in stack)


def _gradient_of(names: list[str], operator: str | None) -> str | None:
    """Return the operator whose gradient was computed.

    Args:
        operator: The operator that allocated, which the gradient's computation called.
    """
    nodes = (_GRADIENT_NODE.search(name) for name in names)
    if (node := next(filter(None, nodes), None)) is not None:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node[1]).lower().strip("_")
    functions = (_GRADIENT_FUNCTION.search(name) for name in names)
    if (function := next(filter(None, functions), None)) is not None:
        called = function[1]
        if operator is not None and called.startswith(f"{operator}_"):
            return operator
        return _GRADIENT_OF.sub("", called)
    return operator


def _without_overload(name: str) -> str:
    return _OVERLOAD_SUFFIX.sub("", name) or name


def _path(frame: Frame) -> str:
    return frame.filename.replace("\\", "/")


def _is_python(frame: Frame) -> bool:
    return _PYTHON_FILE.fullmatch(frame.filename) is not None


def _in_library(frame: Frame) -> bool:
    return _LIBRARY_PATH.match(_path(frame)) is not None


def _frame_text(frame: Frame) -> str:
    path = _path(frame)
    short = _LIBRARY_PATH.sub("", path)
    name = short if short != path else short.rsplit("/", 1)[-1]
    return one_line(f"{name or '?'}:{frame.line or '?'} in {frame.name or '?'}", _MAX_LETTERS)


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """Sums over segments: of a device, or those of one size class on it.

    Attributes:
        blocks: Blocks in use.
        reserved: What the allocator took from the device.
        allocated: What tensors hold.
        active: The same, and what was freed but is still used by another stream.
        requested: What the script asked for; less than ``active`` by rounding.
        split_free: Free memory in segments that are partly in use, which the allocator cannot give back to
            the device. As in torch's ``inactive_split_bytes``, expandable segments do not count: they can.
        largest_free: The largest request that fits without more memory of the device.
        private: The part of ``reserved`` in pools of CUDA graphs and the like, which only they can use.
        private_free: The part of ``free`` in such pools.
    """

    segments: int
    blocks: int
    reserved: int
    allocated: int
    active: int
    requested: int
    split_free: int
    largest_free: int
    private: int
    private_free: int

    @property
    def free(self) -> int:
        """What the allocator has reserved and does not use."""
        return self.reserved - self.active

    @property
    def rounding(self) -> int:
        """What is used up by rounding requests."""
        return self.active - self.requested

    @property
    def split_share(self) -> float:
        """The share of ``split_free`` in ``reserved``: fragmentation."""
        return self.split_free / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class StackMemory:
    """The memory that one place in the code holds at one moment.

    Attributes:
        stack: The stack with most of it.
        share: Of all memory that is held at that moment.
    """

    place: Place
    stack: Stack
    blocks: int
    size: int
    share: float


def add_up(segments: Sequence[Segment]) -> SegmentSums:
    blocks = [block for segment in segments for block in segment.blocks]
    return SegmentSums(
        segments=len(segments),
        blocks=sum(block.state is not State.FREE for block in blocks),
        reserved=sum(segment.size for segment in segments),
        allocated=sum(block.size for block in blocks if block.state is State.ALLOCATED),
        active=sum(map(_active, segments)),
        requested=sum(block.requested for block in blocks if block.state is not State.FREE),
        split_free=sum(
            segment.size - _active(segment)
            for segment in segments
            if _active(segment) and not segment.is_expandable
        ),
        largest_free=max((run for segment in segments for run in _free_runs(segment.blocks)), default=0),
        private=sum(segment.size for segment in segments if segment.is_private),
        private_free=sum(segment.size - _active(segment) for segment in segments if segment.is_private),
    )


def _active(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state is not State.FREE)


def _free_runs(blocks: Iterable[Block]) -> Iterator[int]:
    """Yield the length of each stretch of free blocks that touch each other."""
    run = 0
    for block in blocks:
        run = run + block.size if block.state is State.FREE else 0
        yield run


def holders(segments: Iterable[Segment]) -> list[Holder]:
    """Return what holds memory at the end."""
    return [
        Holder(block.size, block.stack, block.is_earlier)
        for segment in segments
        for block in segment.blocks
        if block.state is not State.FREE
    ]


def by_place(holders: Iterable[Holder], *, has_stacks: bool) -> list[StackMemory]:
    """Return the memory held by place, most first.

    Args:
        has_stacks: Whether stacks were recorded. What has none then was allocated by a thread without Python.
    """
    stacks = Counter[tuple[Stack, bool]]()
    counts = Counter[tuple[Stack, bool]]()
    for size, stack, is_earlier in holders:
        stacks[stack, is_earlier] += size
        counts[stack, is_earlier] += 1
    places = defaultdict[Place, list[tuple[Stack, bool]]](list)
    for stack, is_earlier in (each for each, _ in stacks.most_common()):
        without = EARLIER if is_earlier else NO_PYTHON if has_stacks else NOT_RECORDED
        places[place(stack, without)].append((stack, is_earlier))
    total = sum(stacks.values())
    found = [
        StackMemory(
            place=where,
            stack=those[0][0],
            blocks=sum(counts[each] for each in those),
            size=(size := sum(stacks[each] for each in those)),
            share=size / total if total else 0.0,
        )
        for where, those in places.items()
    ]
    return sorted(found, key=lambda each: -each.size)
