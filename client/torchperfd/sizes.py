"""How a number of bytes is written for people; reports and analyses all write it this way."""


def size(count: int) -> str:
    """Return bytes in the unit that reads best, three significant digits."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # From 1000 on, three digits read better in the next unit.
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
