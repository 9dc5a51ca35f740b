"""Loading of the lake's objects into DuckDB: of several versions, forms and folders, some of them damaged."""

import importlib.util
import json
from datetime import date
from gzip import compress
from pathlib import Path

import pytest

from torchperfd_cli.lake.database import LakeDatabase
from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.lake.tables import RUNS, json_lines, object_key, parquet

DAY = date(2026, 11, 28)
COUNTED = (
    "SELECT cluster, count(*), count(run), sum(steps), count(torch_version) FROM runs"
    " GROUP BY ALL ORDER BY ALL"
)
ROW = json.dumps({"node": "n", "run": "r", "steps": 2, "torch_version": "2.8"}).encode()

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("duckdb") is None or importlib.util.find_spec("pyarrow") is None,
    reason="duckdb and pyarrow are in the extra lake",
)


class Lake:
    """A lake in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def put(self, name: str, content: bytes, cluster: str = "east") -> Path:
        path = self.folder / object_key(RUNS, DAY.isoformat(), cluster, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def database(self) -> LakeDatabase:
        objects = LakeObjects(self.folder.as_uri())
        return LakeDatabase(objects, self.folder.parent / "cache/history.duckdb", DAY, DAY)

    def ask(self, query: str = COUNTED) -> tuple[list[tuple[object, ...]], list[str]]:
        database = self.database()
        try:
            return database.answer(query).rows, database.damaged
        finally:
            database.close()


@pytest.fixture(scope="module")
def present() -> bytes:
    """An object of this version."""
    return parquet(RUNS, json_lines([ROW]))


def older_version(path: Path) -> bytes:
    """Return an object without a column that was added later, and with one that is gone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"node": ["n"], "run": ["r"], "steps": [2], "gone": [1]}), path)
    return path.read_bytes()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


def test_loading_fills_columns_of_older_objects(lake: Lake, tmp_path: Path, present: bytes) -> None:
    lake.put("a.parquet", older_version(tmp_path / "old"))
    lake.put("b.parquet", present)
    assert lake.ask() == ([("east", 2, 2, 4, 1)], [])


def test_loading_takes_forms_and_clusters_together(lake: Lake, present: bytes) -> None:
    for cluster in ("east", "west"):
        lake.put("a.parquet", present, cluster)
        lake.put("b.jsonl.gz", compress(ROW), cluster)
        lake.put("c.parquet", present, cluster)
        lake.put("d.txt", b"of someone else", cluster)
    assert lake.ask() == ([("east", 3, 3, 6, 3), ("west", 3, 3, 6, 3)], [])


def test_loading_names_damaged_objects_and_keeps_others(lake: Lake, present: bytes) -> None:
    for number in range(9):
        lake.put(f"{number}.parquet", b"no Parquet" if number in (3, 7) else present)
    rows, damaged = lake.ask()
    assert rows == [("east", 7, 7, 14, 7)]
    assert [Path(each.split(" (")[0]).name for each in damaged] == ["3.parquet", "7.parquet"]
    lake.put("3.parquet", present)
    rows, damaged = lake.ask()
    assert (rows, len(damaged)) == ([("east", 8, 8, 16, 8)], 1)


@pytest.mark.parametrize("name", ["a[1]*", "date=1999-01-01", "it's"])
def test_loading_takes_folder_of_any_name(tmp_path: Path, name: str, present: bytes) -> None:
    lake = Lake(tmp_path / name / "lake")
    for number in range(3):
        lake.put(f"{number}.parquet", present)
    assert lake.ask() == ([("east", 3, 3, 6, 3)], [])
    assert lake.ask("SELECT DISTINCT date FROM runs") == ([(DAY.isoformat(),)], [])


def test_loading_reads_no_more_than_its_object(lake: Lake, present: bytes) -> None:
    """An object's key may have characters that DuckDB expands."""
    lake.put("*.parquet", present)
    lake.put("b.parquet", present)
    assert lake.ask() == ([("east", 2, 2, 4, 2)], [])
