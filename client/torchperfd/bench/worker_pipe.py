"""The inside of a process that measures: takes requests from a pipe, a JSON document a line, and answers.

It is the leader of a process group, in which the workers of a DataLoader are as well. When the requests end,
because the process that asked is gone, it ends the whole group.
"""

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Final

Answer = dict[str, Any]
_OURS: Final = str(Path(__file__).parents[1])
_LONGEST_REASON: Final = 300


def serve(requests: int, answers: int, make: Callable[[], tuple[Answer, Callable[[Answer], Answer]]]) -> None:
    """Answer requests until they end.

    Args:
        requests: Descriptor to read from.
        answers: Descriptor to write to.
        make: Imports the script; returns the first answer, and what answers a request.
    """
    # What the script prints would otherwise be in the command's output.
    os.dup2(2, 1)
    queue: SimpleQueue[Answer] = SimpleQueue()
    threading.Thread(target=_read, args=(os.fdopen(requests), queue), daemon=True).start()
    with os.fdopen(answers, "w") as out:
        try:
            first, answer = make()
        except BaseException as error:  # noqa: BLE001 - the script's own, whatever it is
            _send(out, {"failed": explain(error), "exit_code": getattr(error, "exit_code", 1)})
            return
        _send(out, first)
        while True:
            try:
                reply = answer(queue.get())
            except Exception as error:  # noqa: BLE001 - the script's own
                reply = {"failed": explain(error)}
            _send(out, reply)


def explain(error: BaseException) -> str:
    """Return an exception in one line, with the last line of the script that it came through."""
    # What a worker raises comes as a text that ends with the exception's own.
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    if "Original Traceback" in str(error):
        return lines[-1].strip()[:_LONGEST_REASON]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<")) and "site-packages" not in frame.filename
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {lines[0][:_LONGEST_REASON]}{where}"


def _send(out: IO[str], answer: Answer) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _read(requests: IO[str], queue: "SimpleQueue[Answer]") -> None:
    for line in requests:
        queue.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)
