"""Exports results: Markdown, comma-separated values, and pandas' tables."""

import csv
import importlib
import io
import re
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any, overload

from torchperfd_daemon.analysis.across import Across
from torchperfd_daemon.analysis.across_report import render_across
from torchperfd_daemon.analysis.advice import Advice
from torchperfd_daemon.analysis.compare_report import change_to_dict
from torchperfd_daemon.analysis.comparison import ComparedTable, Comparison
from torchperfd_daemon.analysis.layout import escaped, ms, printable
from torchperfd_daemon.analysis.report import doubts, facts, hidden_operators, operator_table, to_dict
from torchperfd_daemon.analysis.summary import Summary, SummaryTable
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.text import ranks_phrase


def to_markdown(
    ranks: Sequence[tuple[int | None, Summary]],
    *,
    advice: Sequence[Advice] = (),
    across: Across | None = None,
    of: int = 0,
    limit: int = 15,
    sort_by: str = "self",
) -> str:
    """Return the text report as GitHub-flavoured Markdown, ending in a newline.

    Args:
        ranks: Each rank, None where it is not known, and its answers.
        advice: What to change, most time saved first.
        across: How the ranks waited for one another.
        of: The number of all ranks, of which ``ranks`` may be some; 0 if it is unknown.
        limit: Rows in each operator table.
        sort_by: What they are ordered by.
    """
    parts = _advice(advice, of)
    if across is not None:
        text = io.StringIO()
        render_across(across, text)
        parts.append(_fenced(text.getvalue()))
    for rank, summary in ranks:
        head, *lines = facts(summary, rank)
        parts += [
            f"**{escaped(head)}**\n",
            "".join(f"- {escaped(line)}\n" for line in (*lines, *doubts(summary))),
        ]
        parts.append(operator_table(summary, limit, sort_by).as_markdown())
        hidden = hidden_operators(summary, limit)
        parts += [f"{hidden}\n"] * bool(hidden)
    return "\n".join(parts)


def _advice(advice: Sequence[Advice], of: int) -> list[str]:
    """Return the advice as a numbered list, the setting as code."""
    if not advice:
        return []
    items = [
        f"{number}. **{escaped(each.change)}**{_saves(each, of)}\n\n"
        + indent(f"{escaped(each.evidence)}\n\n{_fenced(each.setting)}", "   ")
        for number, each in enumerate(advice, 1)
    ]
    return ["**Advice**\n", *items]


def _saves(advice: Advice, of: int) -> str:
    on = f", on {ranks_phrase(sorted(advice.ranks), of)}" if advice.ranks else ""
    if not advice.saves_ns_per_step:
        return on
    return f": saves {ms(advice.saves_ns_per_step)} ms {advice.per_what} ({advice.share_of_step:.0%}){on}"


def _fenced(text: str) -> str:
    """Return text as a block of code, which nothing in the text can close."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(printable(line).rstrip() for line in text.rstrip().splitlines())
    return f"{fence}\n{body}\n{fence}\n"


def to_csv(ranks: Iterable[tuple[int | None, Summary]], sort_by: str = "self") -> str:
    """Return the operator tables as comma-separated values: the JSON's keys, a line for every row.

    Args:
        ranks: Each rank, None where it is not known, and its answers.
        sort_by: What the rows of a rank are ordered by.
    """
    rows = [{"rank": rank, **row} for rank, one in ranks for row in to_dict(one, rank, sort_by)["operators"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["rank"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


@overload
def to_pandas(result: Summary, table: SummaryTable = "operators") -> Any: ...
@overload
def to_pandas(result: Comparison, table: ComparedTable = "operators") -> Any: ...
def to_pandas(result: Summary | Comparison, table: Any = "operators") -> Any:
    """Return one table as a ``pandas.DataFrame``; its columns are the keys of the JSON.

    An object within a row becomes columns such as ``breakdown.idle_us``.

    Raises:
        TorchperfdError: pandas is not installed.
    """
    if isinstance(result, Comparison):
        rows = [change_to_dict(row, in_bytes=table == "memory") for row in result.table(table)]
    else:
        rows = [_flat(row) for row in to_dict(result, result.rank)[table]]
    return _frame(rows)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        flat |= (
            {f"{key}.{part}": each for part, each in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return flat


def _frame(rows: Sequence[dict[str, Any]]) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise TorchperfdError("pandas is not installed", "pip install pandas") from None
    return pandas.DataFrame(rows)


def _plain(value: Any) -> Any:
    """Return a cell: a stack as one text, nothing for none."""
    if isinstance(value, (list, tuple)):
        return " < ".join(value)
    return "" if value is None else value
