"""What the library raises: only from calls a script makes on purpose, never from a hook."""


class TorchperfdError(Exception):
    """Base of all errors of the library, the daemon and the commands.

    ``str()`` is one line: what happened, then what to do. ``exit_code`` is what a command returns for it.

    Args:
        problem: What went wrong, without a final full stop.
        remedy: The next thing to do, as an imperative; empty when nothing helps.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


class CaptureError(TorchperfdError):
    """A capture failed; the message says why, and what to do."""


class CaptureTimeoutError(CaptureError):
    """A capture did not end in time."""

    exit_code = 124
