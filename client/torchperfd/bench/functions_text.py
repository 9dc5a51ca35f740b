"""The table of ``torchperfd bench compare``."""

from torchperfd.bench.functions_bench import Comparison, FunctionsBench
from torchperfd.model.terminal_text import fold_text


def functions_text(bench: FunctionsBench, width: int | None = None) -> str:
    """Return the result as lines for people, without a newline at the end.

    Args:
        width: Columns of the terminal, for what is below torch's table; None if the text is not for one.
    """
    lines = [bench.table.rstrip(), ""]
    has_threads = len({row.threads for row in bench.rows}) > 1
    for number, row in enumerate(bench.rows):
        title = row.name
        if has_threads:
            title = f"{title}, threads={row.threads}" if title else f"threads={row.threads}"
        if title:
            lines.append(fold_text(title, width))
        for function in range(1, len(bench.names)):
            compared = bench.compare(function, number)
            words = f"  {bench.names[function]}: {_in_words(compared, bench.names[0])}"
            lines.append(fold_text(words, width))
    return "\n".join(lines)


def _in_words(compared: Comparison, first: str) -> str:
    # What is faster reads better as how many times as fast.
    if not compared.differs:
        return (
            f"no difference from {first} beyond noise ({compared.low:.2f} to {compared.high:.2f} of its time)"
        )
    if compared.ratio < 1:
        interval = f"{1 / compared.high:.2f} to {1 / compared.low:.2f}"
        return f"{1 / compared.ratio:.2f} times as fast as {first} (95 %: {interval})"
    interval = f"{compared.low:.2f} to {compared.high:.2f}"
    return f"takes {compared.ratio:.2f} times as long as {first} (95 %: {interval})"
