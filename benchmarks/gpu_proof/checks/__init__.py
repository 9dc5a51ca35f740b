"""One module per check; each has ``TITLE``, ``SECONDS`` at most on a GPU, and ``run(machine)``."""
