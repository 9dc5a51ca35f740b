"""``python -m torchperfd``: ``run`` happens in this process; all else is the command line's."""

import sys
from importlib import metadata


def main() -> None:
    """Dispatch without importing what a training process does not need."""
    if sys.argv[1:2] == ["run"]:
        from torchperfd.launch.runner import main as run

        run(sys.argv[2:])
        return
    # The client never imports the daemon: it asks the installation for the command.
    (command,) = metadata.entry_points(group="console_scripts", name="torchperfd")
    sys.exit(command.load()())


if __name__ == "__main__":
    main()
