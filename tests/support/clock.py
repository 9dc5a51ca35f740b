"""A clock that a test moves on."""


class Clock:
    """Seconds that pass only when the test says so.

    Attributes:
        now: What it shows.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
