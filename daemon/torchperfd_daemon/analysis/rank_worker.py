"""The process that analyses the traces of ranks: ``rank_worker ANSWERS``, a descriptor to write to.

Until its input ends, it reads a path with its `Request`, and writes an exit code and, if that is 0, the
summary or the reason why there is none. All are pickled.

Importing takes longer than a short trace does. The process therefore imports once, and forks a child for each
rank: a child returns its memory when it ends, and if it is killed, only its own rank is lost.
"""

import ctypes
import gc
import os
import pickle
import resource
import signal
import sys
import traceback
from typing import Final

from torchperfd_daemon.analysis.ranks import Request, answer
from torchperfd_daemon.object_store import AnyPath

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end like any other program, without a traceback
    gc.freeze()  # a collection in a child would copy what both could share
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        while True:
            try:
                path, request = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(_in_a_child(path, request), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _in_a_child(path: AnyPath, request: Request) -> tuple[int, bytes]:
    """Return the child's exit code and its pickled answer. This process has one thread, so it may fork."""
    with os.fdopen(os.memfd_create("torchperfd-answer"), "w+b") as shared:
        parent = os.getpid()
        child = os.fork()
        if not child:
            code = 1
            try:
                _end_with(parent)
                os.nice(request.nice)
                if request.max_memory is not None:
                    resource.setrlimit(resource.RLIMIT_DATA, (request.max_memory, request.max_memory))
                pickle.dump(answer(path, request), shared, pickle.HIGHEST_PROTOCOL)
                shared.flush()
                code = 0
            except BaseException:  # noqa: BLE001 - nothing may return into the parent's loop
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        shared.seek(0)
        return os.waitstatus_to_exitcode(status), shared.read()


def _end_with(parent: int) -> None:
    """Have this process killed when its parent is, since nothing would read its answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before


if __name__ == "__main__":
    main()
