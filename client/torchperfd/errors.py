"""What the library raises: only from calls a script makes on purpose, never from a hook."""


class TorchperfdError(Exception):
    """Base of all; ``exit_code`` is what the command line would return for it."""

    exit_code = 1


class CaptureError(TorchperfdError):
    """A capture failed; the message says why, and what to do."""


class CaptureTimeoutError(CaptureError):
    """A capture did not end in time."""

    exit_code = 124
