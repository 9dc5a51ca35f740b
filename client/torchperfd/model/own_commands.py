"""Commands that start torchperfd's own code, whatever modules lie in the current directory.

``python -m`` and ``python -c`` search the current directory first, which may be one that other users can
write. No command of this project is built elsewhere. Nothing is exported, so children see no difference.

This file is also what :func:`script_command` runs: ``python own_commands.py MODULE ARGUMENT…``. It therefore
imports only what the interpreter has loaded before.
"""

import os
import sys


def own_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules, in a process that runs no code of the user's.

    The process ignores what this one ignores: the environment (``-E``), the user's packages (``-s``).
    """
    return [sys.executable, *_isolation(), "-P", "-m", module, *arguments]


def own_file_command(file: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our files as :func:`own_command` does, without its package."""
    return [sys.executable, *_isolation(), "-P", file, *arguments]


def script_command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of one of our modules, which then runs a script.

    It has no flag of the interpreter: the script would see it in :data:`sys.flags`, and multiprocessing would
    pass it on to the processes that it spawns.
    """
    return [sys.executable, os.path.abspath(__file__), module, *arguments]  # noqa: PTH100


def leave_start_directory() -> None:
    """Take the current directory off the front of :data:`sys.path`, where ``python -m`` has put it."""
    try:
        current = os.getcwd()  # noqa: PTH109
    except OSError:
        return  # it was removed, so Python put nothing there
    if not sys.flags.safe_path and sys.path[:1] == [current]:
        del sys.path[0]


def _isolation() -> list[str]:
    if sys.flags.isolated:
        return ["-I"]
    return ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's directory: its modules are not top-level ones
    # Where the package was put on the path by hand, as in a container that was given it, children find it.
    model = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    package_root = os.path.dirname(os.path.dirname(model))  # noqa: PTH120
    if package_root not in sys.path:
        sys.path.append(package_root)
    del sys.argv[0]
    from importlib import import_module

    import_module(sys.argv[0]).main()
