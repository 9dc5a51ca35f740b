"""Run a training script under the torchperfd that a container was given.

    torchrun --nproc-per-node=8 /opt/torchperfd/run.py train.py

Takes the arguments of ``torchperfd run``. The client for this Python lies in a folder beside this file. It
goes to the end of the search path: what the container has itself, such as its own torchperfd, grpcio or
protobuf, comes first. Where the client cannot be imported the script runs without it.
"""

import os
import sys
from typing import NoReturn


def run_without(reason: ImportError) -> NoReturn:
    """Have Python run the script as if this file had not been named."""
    sys.stderr.write(f"torchperfd: the script runs without it: {reason}\n")
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def main() -> None:
    """Find the client and hand over to it."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  as light as the client
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder
    sys.path.append(f"{here}/{sys.version_info.major}.{sys.version_info.minor}")
    try:
        from torchperfd.launch.runner import main as run
    except ImportError as error:
        run_without(error)
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
