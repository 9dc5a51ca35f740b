"""The benchmark of the lake, small: real processes that are killed, and a store that fails."""

from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from benchmarks.lake.__main__ import away_for, check_rows, expected_rows, open_database, play_with_kills

from torchperfd_cli.lake.database import view_names

NODES = 2
WINDOWS = 36


def test_lake_has_each_row_once_after_kills(tmp_path: Path) -> None:
    killed = play_with_kills(tmp_path, NODES, WINDOWS, kills=2, pause=0.8)
    database = open_database(tmp_path)
    try:
        assert killed > 0
        assert check_rows(database, expected_rows(NODES, WINDOWS)) == []
        assert [view for view in view_names() if not database.answer(f"SELECT * FROM {view}").rows] == []
    finally:
        database.close()


def test_lake_has_all_rows_after_store_was_away(tmp_path: Path) -> None:
    assert away_for(tmp_path / "away", 24) == []
