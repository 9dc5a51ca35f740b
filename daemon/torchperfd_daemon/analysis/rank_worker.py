"""The process that analyses one rank's trace: ``rank_worker ANSWER``, a descriptor to write to.

It reads a path and a :class:`~torchperfd_daemon.analysis.Request` from its input, and writes the summary, or
the reason why there is none. All of these are pickled.
"""

import os
import pickle
import resource
import sys

from torchperfd_daemon.analysis.ranks import answer


def main() -> None:
    """Answer one request, and end."""
    path, request = pickle.load(sys.stdin.buffer)
    os.nice(request.nice)
    if request.max_memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request.max_memory, request.max_memory))
    with os.fdopen(int(sys.argv[1]), "wb") as out:
        pickle.dump(answer(path, request), out, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
