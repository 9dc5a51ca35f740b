"""Reads a pickle that holds only plain data, and runs nothing that a file asks for.

A pickle is a program. Before Python's unpickler sees one, :func:`load_plain` goes through its operations and
refuses all but those that build dicts, lists, texts, numbers and tuples of whole numbers. It also refuses
what is small in a file and large or endless in memory.
"""

import io
import pickle
import re
from typing import Final, NoReturn

from torchperfd_daemon.errors import TorchperfdError

_MAGIC: Final = 0x80
_PROTOCOLS: Final = range(2, 6)
_STOP: Final = 0x2E
_LONG_BINPUT: Final = 0x72
# After an operation a FRAME may follow, which only announces how many bytes come next.
_FRAME: Final = rb"\x95.{8}"
_LONG: Final = rb"\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"
_INT: Final = rb"(?:K.|M..|J.{4}|" + _LONG + rb")"
_INT_PART: Final = _INT + rb"(?:" + _FRAME + rb")?+"
# A run of operations, as one expression, since a snapshot has millions. In this order: a tuple of any length;
# a number, or a tuple of up to three; MEMOIZE, None, booleans, marks, empty containers and what fills them;
# BINGET and BINPUT; LONG_BINGET; BINFLOAT. Tuples hold whole numbers only: Python hashes a nested tuple by
# recursion, and does not come to an end with one that holds another many times.
_RUN: Final = re.compile(
    rb"(?:\((?:%(part)s)*+t|%(part)s(?:\x85|%(part)s(?:\x86|%(part)s\x87))?+"
    rb"|[\x94N\x88\x89()\]}aeus]|[hq].|j.{4}|G.{8}|%(frame)s)*+" % {b"part": _INT_PART, b"frame": _FRAME},
    re.DOTALL,
)
# Bytes of the longest operation of a fixed length.
_LONGEST: Final = 11
# Operations with a length of so many bytes: texts and bytes.
_COUNTED: Final = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8}
# GLOBAL, STACK_GLOBAL, INST, OBJ, REDUCE, NEWOBJ, NEWOBJ_EX, BUILD, EXT1, EXT2, EXT4, PERSID, BINPERSID.
_CODE: Final = frozenset(b"c\x93ioR\x81\x92b\x82\x83\x84PQ")
_CODE_REFUSED: Final = "this snapshot contains code; torchperfd reads only plain data"
_CODE_REMEDY: Final = "do not load it with pickle unless you trust its author"


def is_pickle(head: bytes) -> bool:
    """Return whether the first two bytes of a file are those of a binary pickle."""
    return len(head) > 1 and head[0] == _MAGIC and head[1] in _PROTOCOLS


def load_plain(data: bytes) -> object:
    """Return what a binary pickle of plain data holds; see the module.

    Memory and time are proportional to ``len(data)``.

    Raises:
        TorchperfdError: It is cut off or damaged, holds anything else, or this process has too little memory.
    """
    _check_operations(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise TorchperfdError("too little memory to read it", "read it on a machine with more") from None
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError
    ) as error:  # fmt: skip
        # Such as a dict whose key is a list, or a frame of 2**63 bytes: no writer of pickles makes those.
        raise _damaged(str(error)) from None


class _PlainUnpickler(pickle.Unpickler):
    """The second defence: the operations that need these are refused before."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)

    def persistent_load(self, pid: object) -> NoReturn:
        raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)


def _check_operations(data: bytes) -> None:
    if not is_pickle(data[:2]):
        raise _damaged("it is no binary pickle")
    position = 2
    while True:
        if (run := _RUN.match(data, position)) is not None:
            position = run.end()
        if position >= len(data):
            raise _cut_off()
        operation = data[position]
        if operation == _STOP:
            return
        if (width := _COUNTED.get(operation)) is not None:
            position += 1 + width
            length = int.from_bytes(data[position - width : position], "little")
            if length > len(data) - position:
                raise _cut_off()
            position += length
        elif operation == _LONG_BINPUT:
            # The unpickler reserves a table up to the largest number; real ones count from 0.
            if int.from_bytes(data[position + 1 : position + 5], "little") > position:
                raise _damaged("a number of its memo is too large")
            position += 5
        elif operation in _CODE:
            raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)
        elif _needs_more(operation, len(data) - position):
            raise _cut_off()
        else:
            raise _damaged(f"no snapshot has the pickle operation 0x{operation:02x}")


def _needs_more(operation: int, left: int) -> bool:
    """Return whether an operation at the end of the file would be plain if the file went on."""
    return left <= _LONGEST and operation in b"KMJ\x8ahqjG\x95"


def _cut_off() -> TorchperfdError:
    return TorchperfdError(
        "the snapshot is cut off", "write it again: the disk was full or the process ended"
    )


def _damaged(why: str) -> TorchperfdError:
    return TorchperfdError(
        f"the snapshot is damaged or no output of torch.cuda.memory._dump_snapshot: {why}", "write it again"
    )
