"""Where in memory a reducer has its backward stats: when each gradient was ready.

Asking the reducer takes pybind, the interpreter's lock and a list, all of it cold in every step: nothing else
that hooks did cost as much. They are a ``std::vector`` among its members, which the compiled tape reads where
it lies. No layout is taken for granted: it is the member that holds what the reducer says. The search goes
through ``/proc/self/mem``, where reading what is not there is an error and no crash; what it finds is
compared with what the reducer says a few times before it is relied upon, and now and then afterwards.
"""

import os
import sys
from array import array
from typing import Any, Final

from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.interrupts import is_from_script

_WORD: Final = 8
_SEARCHED_BYTES: Final = 4096
"""A reducer is about half as large."""
_NO_ADDRESS: Final = 1 << 56


def find_stats(reducer: Any) -> int | None:
    """Return the address of the vector, None where it is not found.

    Args:
        reducer: Of ``DistributedDataParallel``, alive and with a backward behind it.
    """
    if sys.maxsize < 1 << 32:
        return None
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if is_from_script(error):
            raise
        return None
    try:
        return _search(memory, id(reducer), array("q", reducer.get_backward_stats()).tobytes())
    except OSError as error:
        if is_from_script(error):
            raise
        return None
    finally:
        os.close(memory)


def _search(memory: int, address: int, wanted: bytes) -> int | None:
    # What pybind's object stands for is told right behind what every object has.
    (own,) = array("Q", os.pread(memory, _WORD, address + object.__basicsize__))
    if not any(wanted) or own >= _NO_ADDRESS:
        return None
    there = os.pread(memory, _SEARCHED_BYTES, own)
    words = array("Q", there[: len(there) // _WORD * _WORD])
    for number, (begin, end, limit) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        is_vector = begin % _WORD == 0 and end - begin == len(wanted) and end <= limit < _NO_ADDRESS
        if is_vector and _holds(memory, begin, wanted):
            return own + number * _WORD
    return None


def _holds(memory: int, address: int, wanted: bytes) -> bool:
    try:
        return os.pread(memory, len(wanted), address) == wanted
    except OSError as error:
        if is_from_script(error):
            raise
        return False


for _function in (find_stats, _search, _holds):
    keep_out_of_graphs(_function, inline=True)
