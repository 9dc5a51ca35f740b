"""The ``torchperfd`` command: its commands, benchmarks of loaders and functions, and the search of tune."""
