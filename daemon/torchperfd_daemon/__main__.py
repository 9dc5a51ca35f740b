"""``python -m torchperfd_daemon`` is the ``torchperfd`` command."""

import os
import sys


def _leave_start_directory() -> None:
    # As own_commands does. Before it is done, a module of the current directory could be imported
    # in place of that one.
    try:
        current = os.getcwd()  # noqa: PTH109
    except OSError:
        return
    if not sys.flags.safe_path and sys.path[:1] == [current]:
        del sys.path[0]


if __name__ == "__main__":
    _leave_start_directory()
    import importlib

    # By its name: the daemon does not depend on the commands.
    importlib.import_module("torchperfd_cli.main").main()
