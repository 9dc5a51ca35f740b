"""The facts about a script's end: its state, the exception, and why another rank ended it."""

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from torchperfd.card.ansi import without_codes
from torchperfd.launch.termination import Terminated
from torchperfd.runs.ending import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    TERMINATED,
    RankFailure,
    explain_error,
    first_failure,
)

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2

_LONGEST_ERROR: Final = 200
_LONGEST_CHAIN: Final = 16
_SHARED_MEMORY: Final = "/dev/shm"


def exit_document(ended: BaseException | None) -> dict[str, Any]:
    """Return the state, exit code and error of a script's end, as a run's document has them.

    Args:
        ended: What the script raised; None where it reached its end.
    """
    if ended is None:
        return {"state": FINISHED, "code": 0}
    if isinstance(ended, SystemExit):
        if ended.code in (None, 0):
            return {"state": FINISHED, "code": 0}
        if isinstance(ended.code, int):
            return {"state": FAILED, "code": ended.code, "error": f"exit code {ended.code}"}
        return {"state": FAILED, "code": 1, "error": _first_line(ended.code)}
    if isinstance(ended, KeyboardInterrupt):
        return {"state": INTERRUPTED, "code": 130}
    if isinstance(ended, Terminated):
        return {"state": TERMINATED, "code": 143}
    return {"state": FAILED, "code": 1, "error": _error_words(ended)}


def failure_words(ended: BaseException | None) -> str:
    """Return the error of a script that has failed, in one line; empty if it has not."""
    document = exit_document(ended)
    return str(document.get("error") or FAILED) if document["state"] == FAILED else ""


def cause_elsewhere(answer: "control_pb2.GetRunResponse | None", own_rank: int) -> str:
    """Return which other rank's failure came first, in words; empty if none did.

    Args:
        answer: What the daemon knows of the run; None if no daemon has answered.
    """
    from torchperfd.v1 import session_pb2

    failures = []
    for rank in answer.ranks if answer is not None else ():
        steps = sum(k.steps for k in rank.account.kinds if k.kind == session_pb2.STEP_KIND_TRAIN)
        if rank.failure:
            number = rank.identity.rank
            failures.append(RankFailure(number, rank.failure, steps, rank.failed_unix_seconds))
    return first_failure(failures, own_rank)


def _error_words(error: BaseException) -> str:
    """Return an exception in one line, or that among its causes which shows why it came to it."""
    words = [_one_line(each) for each in _chain(error)]
    shared_memory = _shared_memory()
    explained = (explain_error(each, shared_memory) for each in words)
    return next((found for found, each in zip(explained, words, strict=True) if found != each), words[0])


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those that it was raised from or while handling, the last one first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain and len(chain) < _LONGEST_CHAIN:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _one_line(error: BaseException) -> str:
    message = _first_line(error)
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _first_line(error: object) -> str:
    text = ""
    # The script's own exception may have a broken __str__.
    with contextlib.suppress(Exception):
        text = without_codes(str(error))
    lines = (line.strip() for line in text.splitlines())
    return next((line[:_LONGEST_ERROR] for line in lines if line), "")


def _shared_memory() -> tuple[int, int] | None:
    """Return the size of the shared memory's file system and what of it is in use, in bytes."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize
