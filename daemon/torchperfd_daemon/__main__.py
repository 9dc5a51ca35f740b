"""``python -m torchperfd_daemon`` is the ``torchperfd`` command."""

from torchperfd_daemon.cli import main

if __name__ == "__main__":
    main()
