"""Documents: each kind of block on a terminal, in a pipe, as Markdown, as HTML, and as CSV."""

from collections.abc import Iterator

import pytest

from torchperfd.document.blocks import (
    Bar,
    Bars,
    Block,
    Code,
    Document,
    Facts,
    FirstThatFits,
    Heading,
    Item,
    Panel,
    Sentences,
)
from torchperfd.document.markup import render_csv, render_html, render_markdown
from torchperfd.document.tables import Table
from torchperfd.document.terminal import Page, render
from torchperfd.document.text import text_width

FACTS = Facts([("why", "data is late"), ("", "on rank 1"), ("fix", "workers=4")], code=("fix",))
CAUSE = Panel(Heading("✗ input-bound", " · 77%", "bad"), [FACTS])
TABLE = Table(["phase", "ms"], [["a|b", "1"], ["c", "20"]], left=("phase",), styles=("bad", ""))
BARS = Bars(
    ["phase", "mean ms", "share", "p50"], [Bar("data", "7.0", 0.5, cells=["6"]), Bar("x", "1", None, "none")]
)


def drawn(*blocks: Block, columns: int | None = None, reading: int = 40, colour: bool = False) -> list[str]:
    return render(Document([blocks]), Page(columns, reading, colour)).splitlines()


def wide() -> Iterator[Table]:
    yield Table(["name", "first", "second"], [["node", "1", "2"]])
    yield Table(["name", "rest"], [["node", "3"]], lift=("name",))


def test_sections_have_a_blank_line_between_them() -> None:
    document = Document([[Sentences(["a"]), Sentences(["b"])], [Sentences([])], [Heading("c")]])
    assert render(document) == "a\nb\n\nc"


def test_rule_of_a_wide_name_is_as_wide_as_the_page() -> None:
    assert drawn(Heading("run 数据", is_rule=True), reading=20) == ["── run 数据 " + "─" * 8]


def test_panel_is_in_capitals_with_its_facts_below() -> None:
    assert drawn(CAUSE) == ["✗ INPUT-BOUND · 77%", "why  data is late", "     on rank 1", "fix  workers=4"]


def test_panel_colours_its_heading_and_no_more() -> None:
    assert drawn(CAUSE, colour=True)[0] == "\x1b[1;31m✗ INPUT-BOUND\x1b[0m · 77%"
    assert drawn(CAUSE, colour=True)[1:] == drawn(CAUSE)[1:]


def test_facts_of_wide_names_are_aligned() -> None:
    assert drawn(Facts([("数据", "a"), ("x", "b")])) == ["数据  a", "x     b"]
    assert drawn(Facts([("a-long-name", "a")], column=4)) == ["a-long-name  a"]


def test_facts_are_folded_below_what_is_said() -> None:
    assert drawn(Facts([("why", "one two three")]), columns=12) == ["why  one two", "     three"]
    assert drawn(Facts([("why", "one two three")], fold="never"), columns=12) == ["why  one two three"]


def test_bars_fill_the_width_for_reading() -> None:
    assert drawn(BARS) == [
        "phase  mean ms  share                 p50",
        "data       7.0  █████       50%         6",
        "x            1  none",
    ]


def test_bars_of_wide_names_are_aligned() -> None:
    bars = Bars(["phase", "ms", "share"], [Bar("数据加载", "1", 1.0), Bar("x", "1", 1.0)])
    assert len({text_width(line) for line in drawn(bars)[1:]}) == 1


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (None, ["name  first  second", "node      1       2"]),
        (18, ["name  rest", "node     3"]),
        (9, ["rest", "name node", "   3"]),
        (3, ["rest", "name node", "   3"]),
    ],
)
def test_first_that_fits_goes_from_wide_to_narrow(columns: int | None, lines: list[str]) -> None:
    assert drawn(FirstThatFits(wide), columns=columns) == lines
    assert drawn(FirstThatFits(wide, plain_width=18))[0] == "name  rest"


def test_table_has_notes_below_where_there_is_no_room() -> None:
    table = Table(["n"], [["1"], ["2"]], notes=["  its own setting", " ◀"])
    assert drawn(table) == ["n", "1  its own setting", "2 ◀"]
    assert drawn(table, columns=12) == ["n", "1", "    its own", "    setting", "2 ◀"]


def test_table_of_groups_names_them_in_rules_where_narrow() -> None:
    table = Table(
        ["group", "what", "n"], [["fit", "all", "1"], ["", "part", "2"]], ("group", "what"), is_grouped=True
    )
    assert drawn(table) == ["group  what  n", "──────────────", "fit    all   1", "       part  2"]
    assert drawn(table, columns=9) == ["what  n", "── fit ──"[:7], "all   1", "part  2"]


def test_item_has_its_number_and_the_rest_indented() -> None:
    item = Item(
        2, Heading("do this", ": saves much"), [Sentences(["as seen"], indent=3), Code(["f(x)"], indent=3)]
    )
    assert drawn(item) == ["2. do this: saves much", "   as seen", "   f(x)"]
    assert render_markdown(Document([[item]])).splitlines() == [
        *("2. **do this**: saves much", "", "   as seen", "", "   ```", "   f(x)", "   ```"),
    ]


def test_markdown_escapes_what_it_shows() -> None:
    document = Document(
        [[CAUSE, Sentences(["a_b", "<c>"], is_list=True)], [TABLE, BARS, FirstThatFits(wide)]]
    )
    assert render_markdown(document) == (
        "**✗ input-bound** · 77%\n\n"
        "- why: data is late\n- on rank 1\n- fix: workers=4\n- a\\_b\n- &lt;c&gt;\n\n"
        "| phase | ms |\n| --- | ---: |\n| **a\\|b** | **1** |\n| c | 20 |\n\n"
        "| phase | mean ms | share | p50 |\n| --- | ---: | ---: | ---: |\n"
        "| data | 7.0 | 50% | 6 |\n| x | 1 | none |  |\n\n"
        "| name | first | second |\n| ---: | ---: | ---: |\n| node | 1 | 2 |\n"
    )


def test_html_escapes_what_it_shows() -> None:
    evil = "<script>"
    blocks: tuple[Block, ...] = (
        *(Heading(evil), Sentences([evil]), Code([evil]), Facts([(evil, evil)], code=(evil,))),
        *(
            Table([evil], [[evil]], caption=evil),
            BARS,
            FirstThatFits(wide),
            CAUSE,
            Item(1, Heading(evil), [FACTS]),
        ),
    )
    page = render_html(Document([blocks]))
    assert evil not in page
    assert page.count("&lt;script&gt;") == 9
    assert page.count("<table") == 3


def test_csv_has_the_tables_alone() -> None:
    document = Document([[Heading("x"), TABLE, Sentences(["y"])]])
    assert render_csv(document) == "phase,ms\na|b,1\nc,20\n"
