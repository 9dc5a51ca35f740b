"""What goes wrong with the reports of runs."""

from torchperfd.errors import TorchperfdError


class RunFileError(TorchperfdError):
    """A file is no report of a run, or cannot be read."""


class NoSuchRunError(TorchperfdError):
    """No kept run has the name, or several begin with it."""

    exit_code = 3
