"""``torchperfd history`` and its views, on the engines that docs/history.md names."""

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.object_store import BUCKET, ObjectStore
from tests.support.commands import Run

from torchperfd_cli.lake.database import view_names, view_sql
from torchperfd_daemon.captures.destination import Destination
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.lake import sender
from torchperfd_daemon.lake.journal import Journal, Marked
from torchperfd_daemon.lake.rows import Named
from torchperfd_daemon.lake.tables import JSON_LINES, PARQUET, TABLES

HOUR = 3600.0
PAGE = Path(__file__).parents[3] / "docs/history.md"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("duckdb") is None or importlib.util.find_spec("pyarrow") is None,
    reason="duckdb and pyarrow are in the extra lake",
)


def rows_of(node: str, began: float) -> Iterator[Named]:
    """Yield the rows of one node of three runs: slow, changed as promised, slower with a newer PyTorch."""
    runs = (("a", 0.1, 0.04, "2.8"), ("b", 0.06, 0.0, "2.8"), ("c", 0.09, 0.0, "2.9"))
    for number, (run, step, saves, torch) in enumerate(runs):
        since = began + number * HOUR
        common = {"node": node, "run": run, "job": "bert", "owner": "ada"}
        span = {"since_unix_seconds": since, "until_unix_seconds": since + HOUR}
        spent = {f"{bucket.value}_seconds": 0.0 for bucket in Bucket}
        spent |= {"productive_seconds": 0.75 * HOUR, "data_wait_seconds": 0.25 * HOUR}
        yield "goodput", {**common, **span, "rank": ord(node[-1]), "gpus": 1, "starts": 1, **spent}
        cost = {"cause": "input-bound", "fix": "num_workers=4", "step_seconds": step, "saves_seconds": saves}
        yield (
            "runs",
            {
                **common,
                **span,
                **cost,
                "ending": "finished",
                "ranks": 1,
                "world_size": 2,
                "steps": 100,
                "mean_step_seconds": step,
                "torch_version": torch,
                "python_version": "3.12",
                "client_version": "1.0",
            },
        )
        blamed = {"culprit_node": "n2", "lost_seconds": 900.0, "gpus": 1, "position": 0}
        yield "verdicts", {**common, **span, **cost, **blamed}


EXPECTED: dict[str, list[dict[str, Any]]] = {
    "goodput_by_owner": [
        {"owner": "ada", "runs": 3, "gpu_hours": 6.0, "rank_hours": 6.0, "goodput_ratio": 0.75}
    ],
    "lost_by_cause": [{"cause": "input-bound", "runs": 3, "owners": 1, "lost_gpu_hours": 1.5}],
    "worst_nodes": [
        {"cluster": "east", "blamed_node": "n2", "cause": "input-bound", "runs": 3, "lost_gpu_hours": 1.5}
    ],
    "recent_runs": [
        {"run": "c", "ranks_seen": 2, "mean_step": 0.09, "torch": "2.9"},
        {"run": "b", "ranks_seen": 2, "mean_step": 0.06, "torch": "2.8"},
        {"run": "a", "ranks_seen": 2, "mean_step": 0.1, "torch": "2.8"},
    ],
    "numbered_runs": [{"run": run, "number": number} for number, run in enumerate("abc", 1)],
    "consecutive_runs": [
        {"run_before": "a", "run_after": "b", "change_ratio": -0.4, "promised_ratio": 0.4},
        {"run_before": "b", "run_after": "c", "change_ratio": 0.5, "promised_ratio": 0.0},
    ],
    "regressions": [
        {
            "run_before": "b",
            "run_after": "c",
            "change_ratio": 0.5,
            "torch_before": "2.8",
            "torch_after": "2.9",
        }
    ],
    "promises": [
        {
            "run_before": "a",
            "run_after": "b",
            "fix": "num_workers=4",
            "promised_ratio": 0.4,
            "measured_ratio": 0.4,
            "outcome": "came true",
        }
    ],
}


def write_lake(url: str, folder: Path, forms: tuple[str, str]) -> None:
    """Have two nodes write their rows, each in a form of its own."""

    async def send(journal: Journal) -> None:
        async for _ in sender.send(Destination(url), "east", journal):
            pass

    now = time.time()
    for node, form in zip(("n1", "n2"), forms, strict=True):
        journal = Journal(folder / "journal", node)
        rows = list(rows_of(node, now - 3 * HOUR))
        journal.append(now, lambda _, rows=rows: Marked(rows))  # type: ignore[misc]
        journal.seal(now, form)
        asyncio.run(send(journal))
        journal.close()


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lake in a folder, of nodes with and without pyarrow."""
    folder = tmp_path / "lake"
    folder.mkdir()
    monkeypatch.setenv("TORCHPERFD_LAKE", folder.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_lake(folder.as_uri(), tmp_path, (PARQUET, JSON_LINES))
    return folder


def check(found: list[dict[str, Any]], view: str) -> None:
    """Compare the columns that are expected of a view's rows."""
    expected = EXPECTED[view]
    assert len(found) == len(expected)
    for row, want in zip(found, expected, strict=True):
        assert {name: row[name] for name in want} == pytest.approx(want)


def ask(run: Run, query: str) -> list[dict[str, Any]]:
    code, out, err = run("history", query, "--json")
    assert (code, err) == (0, "")
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    return rows


def test_history_views_answer_from_folder(lake: Path, run: Run) -> None:
    assert set(view_names()) == EXPECTED.keys()
    for view in view_names():
        check(ask(run, view), view)


def test_history_views_answer_from_bucket(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    try:
        store.start()
        write_lake(f"s3://{BUCKET}/team", tmp_path, (PARQUET, PARQUET))
        monkeypatch.setenv("TORCHPERFD_LAKE", f"s3://{BUCKET}/team")
        check(ask(run, "promises"), "promises")
        check(ask(run, "goodput_by_owner"), "goodput_by_owner")
    finally:
        store.stop()


def test_history_names_azure_store_that_is_away(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The emulator's address is on this machine, where none runs.
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    code, _, err = run("history", "promises", "--lake", "az://container/prefix")
    assert (code, "az://container/prefix did not take table=runs/" in err) == (1, True)


def test_history_loads_each_object_once(lake: Path, run: Run) -> None:
    assert ask(run, "SELECT count(*) AS rows FROM runs") == [{"rows": 6}]
    for path in lake.rglob("table=runs/**/n?-*"):
        path.write_bytes(b"what is loaded is not read again")
    assert ask(run, "SELECT count(*) AS rows FROM runs") == [{"rows": 6}]


def test_history_damaged_object_is_named(lake: Path, run: Run) -> None:
    damaged, *_ = lake.rglob("table=runs/**/*.parquet")
    damaged.write_bytes(b"no Parquet")
    code, out, err = run("history", "SELECT count(*) AS rows FROM runs", "--json")
    assert (code, json.loads(out)["rows"]) == (5, [{"rows": 3}])
    assert damaged.name in err


def test_history_since_bounds_what_is_seen(lake: Path, run: Run) -> None:
    assert ask(run, "SELECT count(*) AS rows FROM verdicts") == [{"rows": 6}]
    code, out, _ = run("history", "SELECT * FROM verdicts", "--json", "--since", "2100-01-01T00:00")
    assert (code, json.loads(out)["rows"]) == (0, [])


def test_history_table_fits_terminal(lake: Path, run: Run) -> None:
    code, out, err = run("history", "recent_runs", "--limit", "2")
    assert code == 0
    assert "2 of 3" in err
    assert out.count("finished") == 2


@pytest.mark.parametrize("query", ["nothing", "SELECT nothing FROM runs", "SELEC * FROM runs"])
def test_history_wrong_query_is_usage_error(lake: Path, run: Run, query: str) -> None:
    code, out, err = run("history", query)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_history_without_lake_asks_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHPERFD_LAKE", raising=False)
    code, _, err = run("history", "promises")
    assert (code, "--lake" in err) == (2, True)


def test_goodput_of_lake_covers_all_nodes(lake: Path, run: Run) -> None:
    code, out, _ = run("goodput", "--lake", lake.as_uri(), "--run", "b", "--json")
    [found] = json.loads(out)["runs"]
    assert (code, found["run"], len(found["ranks"])) == (0, "b", 2)
    assert run("goodput", "--lake", lake.as_uri(), "--run", "none")[0] == 3


def test_history_page_has_columns_of_all_tables() -> None:
    page = PAGE.read_text()
    for table in TABLES.values():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{table.name}` |")]
        named = {column.name for column in table.own if not column.name.endswith("_seconds")}
        assert all(f"`{name}`" in line for name in named)


CHDB = """
import sys, chdb
lake = sys.argv[1]
from torchperfd_cli.lake.database import view_names, view_sql
session = chdb.session.Session()
for table in ("goodput", "runs", "verdicts"):
    files = f"file('{lake}/table={table}/**/*.parquet')"
    session.query(f"CREATE VIEW {table} AS SELECT * FROM {files} SETTINGS use_hive_partitioning = 1")
for view in ("recent_runs", "numbered_runs", "consecutive_runs"):
    session.query(f"CREATE VIEW {view} AS {view_sql(view)}")
for view in view_names():
    print(view, session.query(view_sql(view), "JSONEachRow").bytes().decode().replace("\\n", "\\t"))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("chdb") is None, reason="chdb has 180 MB and is not among the test's packages"
)
def test_history_views_answer_on_clickhouse(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    write_lake(lake.as_uri(), tmp_path, (PARQUET, PARQUET))
    command = [sys.executable, "-c", CHDB, str(lake)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        view, _, rows = line.partition(" ")
        check([json.loads(row) for row in rows.split("\t") if row], view)
    assert len(done.stdout.splitlines()) == len(EXPECTED)


def test_history_prints_sql_of_view(run: Run) -> None:
    assert run("history", "promises", "--sql") == (0, view_sql("promises"), "")
