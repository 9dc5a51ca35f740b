"""How numbers are written in tables."""


def count(number: int, noun: str) -> str:
    """Return how many there are of something: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def milliseconds(seconds: float) -> str:
    """Return a time with three digits that count: ``0.04``, ``12.3``, ``1234``."""
    value = seconds * 1e3
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
