"""Tables on a real terminal: as wide as it is, in its size, and with numbers that are whole."""

import sys
from pathlib import Path

import pytest
from tests.support.node import Node
from tests.support.terminal import Terminal, plain
from tests.support.wide_files import BACKWARD, RUNS, write_wide_files

COMMANDS = {
    "analyze before.json": "6,000.000",
    "compare before.json after.json": "+29,000.000",
    "compare a.json b.json": RUNS[0],
}


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
@pytest.mark.parametrize("command", COMMANDS)
def test_table_is_no_wider_than_the_terminal(
    node: Node, tmp_path: Path, command: str, columns: int, rows: int
) -> None:
    write_wide_files(tmp_path)
    words = [sys.executable, "-m", "torchperfd", *command.split()]
    code, drawn = Terminal(words, node.env, columns, rows, tmp_path).ended()
    assert code == 0, drawn
    lines = plain(drawn).splitlines()
    assert [line for line in lines if len(line) > columns] == []
    assert any(COMMANDS[command] in line for line in lines), drawn
    if columns > 120 and "before" in command:
        # Only what does not fit is shortened.
        assert BACKWARD in drawn
