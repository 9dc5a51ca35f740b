"""Hook states: which hooks of the client are on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookState:
    """Whether a hook is on.

    Attributes:
        name: The hook's.
        reason: Why it is off, in one line; empty while it is on.
    """

    name: str
    reason: str = ""

    @property
    def is_on(self) -> bool:
        """Whether the hook is on."""
        return not self.reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'on'}"
