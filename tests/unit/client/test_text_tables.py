"""Tables and sentences in a given width: what is shortened, folded and moved, and what stays whole."""

import pytest

from torchperfd.document.tables import Table
from torchperfd.document.text import fold_text, shortened, text_width

HEADS = ("operator", "calls", "self CPU ms", "total CPU ms")
ROWS = [
    ("autograd::engine::evaluate_function: AddmmBackward0", "2", "0.100", "12,345.601"),
    ("aten::mm", "1,200", "0.400", "0.400"),
]


def table(*, lift: tuple[str, ...] = (), folds_heads: bool = True, gap: int = 3) -> Table:
    return Table(
        HEADS,
        ROWS,
        left=("operator",),
        shorten="operator",
        lift=lift,
        labels_lifted=False,
        folds_heads=folds_heads,
        gap=gap,
    )


@pytest.mark.parametrize("width", [None, 120, 91])
def test_draw_changes_nothing_where_there_is_room(width: int | None) -> None:
    assert table().draw(width).lines == [
        "operator                                              calls   self CPU ms   total CPU ms",
        "autograd::engine::evaluate_function: AddmmBackward0       2         0.100     12,345.601",
        "aten::mm                                              1,200         0.400          0.400",
    ]


def test_draw_folds_heads_before_it_shortens() -> None:
    drawn = table().draw(80)
    assert drawn.lines == [
        "                                                              self   total CPU",
        "operator                                             calls  CPU ms          ms",
        "autograd::engine::evaluate_function: AddmmBackward0      2   0.100  12,345.601",
        "aten::mm                                             1,200   0.400       0.400",
    ]
    assert drawn.width == 78


def test_draw_shortens_names_and_no_number() -> None:
    assert table().draw(50).lines == [
        "                                  self   total CPU",
        "operator                 calls  CPU ms          ms",
        "autograd::e…mmBackward0      2   0.100  12,345.601",
        "aten::mm                 1,200   0.400       0.400",
    ]


def test_draw_moves_names_where_numbers_need_all() -> None:
    assert table(lift=("operator",)).draw(30).lines == [
        *("operator", "         self   total CPU", "calls  CPU ms          ms"),
        *("autograd::engin…AddmmBackward0", "    2   0.100  12,345.601"),
        *("aten::mm", "1,200   0.400       0.400"),
    ]


def test_draw_keeps_the_lines_of_each_row_together() -> None:
    drawn = Table(("name", "n"), [("one two", "1"), ("three", "2")], left=("name",), fold="name").draw(16)
    assert (drawn.head, drawn.rows) == (["name     n"], [["one two  1"], ["three    2"]])
    narrow = Table(("name", "n"), [("one two three four", "1"), ("x", "2")], ("name",), fold="name").draw(17)
    assert narrow.rows == [["one two three  1", "  four"], ["x              2"]]


def test_draw_of_no_rows_is_the_head() -> None:
    assert Table(("operator", "total CPU ms"), [], shorten="operator", folds_heads=True).draw(12).lines == [
        *("           total", "operator  CPU ms"),
    ]


def test_draw_counts_columns_of_wide_letters() -> None:
    lines = Table(("name", "n"), [("数据加载", "1"), ("x", "2")], left=("name",)).draw().lines
    assert lines == ["name      n", "数据加载  1", "x         2"]
    assert {text_width(line) for line in lines} == {11}


@pytest.mark.parametrize(
    ("name", "room", "expected"),
    [
        ("aten::mm", 8, "aten::mm"),
        ("scripts/of/everyone/train.py", 20, "scripts/of…/train.py"),
        ("Memcpy HtoD (Pageable -> Device)", 20, "Memcpy Hto…> Device)"),
        ("void gemm<float, 128, 64>(float const*)", 20, "…gemm<float, 128, 6…"),
        ("void at::native::vectorized_kernel<4>()", 22, "…vectorized_kernel<4>…"),
        ("void at::native::(anonymous namespace)::apply<4>(int)", 20, "…apply<4>(int)"),
        ("数据加载数据加载", 9, "数据…加载"),
    ],
)
def test_shortened_keeps_what_identifies(name: str, room: int, expected: str) -> None:
    found = shortened(name, room)
    assert found == expected
    assert text_width(found) <= room


def test_fold_text_continues_at_the_margin() -> None:
    assert fold_text("advised   DataLoader(..., num_workers=3), for 30 ms", 30, margin=10) == (
        "advised   DataLoader(...,\n          num_workers=3), for\n          30 ms"
    )
    assert fold_text("  indented words of a line", 16) == "  indented words\n    of a line"
    assert fold_text("as wide as it is", None) == "as wide as it is"


def test_fold_text_keeps_a_number_and_its_unit() -> None:
    assert fold_text("changed by +3.8 % of the step", 16) == "changed by\n  +3.8 % of the\n  step"
    assert fold_text("takes 5.76 ms of 120 MiB", 12) == "takes\n  5.76 ms of\n  120 MiB"
