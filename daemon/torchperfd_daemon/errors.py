"""Everything that can go wrong in a command: what happened, the remedy, the exit code."""


class TorchperfdError(Exception):
    """An error with an answer. ``str()`` is one line: what happened, then what to do.

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


class UsageError(TorchperfdError):
    """The caller asked for something that cannot be meant."""

    exit_code = 2


class NoSuchTargetError(TorchperfdError):
    """The run, rank, capture or file named does not exist."""

    exit_code = 3


class NotAllowedError(TorchperfdError):
    """The caller may not do that."""


class DiskFullError(TorchperfdError):
    """The disk has too little room for what was asked."""


class DaemonUnreachableError(TorchperfdError):
    """No daemon answers."""

    exit_code = 4


class PartialResultError(TorchperfdError):
    """Some ranks are missing from the result."""

    exit_code = 5


class IncompatibleVersionError(TorchperfdError):
    """The two ends speak no common version of the protocol."""

    exit_code = 6


class DeadlineError(TorchperfdError):
    """It did not happen in time."""

    exit_code = 124
