"""``python -m torchperfd``: ``run`` happens in this process; all else is the command line's."""

import sys

from torchperfd.model.own_commands import leave_start_directory


def main() -> None:
    """Dispatch without importing what a training process does not need."""
    if sys.argv[1:2] == ["run"]:
        from torchperfd.launch.runner import main as run

        run(sys.argv[2:])
        return
    from importlib import metadata

    # The client never imports the daemon: it asks the installation for the command.
    (command,) = metadata.entry_points(group="console_scripts", name="torchperfd")
    sys.exit(command.load()())


if __name__ == "__main__":
    leave_start_directory()
    main()
