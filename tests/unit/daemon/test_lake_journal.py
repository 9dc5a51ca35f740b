"""The lake's journal and its sender: each row reaches the store once, whatever fails between."""

import asyncio
import gzip
import json
import os
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperfd_daemon.captures.destination import Destination, UploadError
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.lake import sender
from torchperfd_daemon.lake.journal import Journal, JournalError, Marked, Pending
from torchperfd_daemon.lake.tables import JSON_LINES, PARQUET, TABLES, check_cluster, object_name
from torchperfd_daemon.lake.uploader import sender_command

DAY = 86_400.0
NOON = 20_000 * DAY + DAY / 2


class Bucket(Destination):
    """A folder that takes a file, or takes none, or takes it and does not say so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.as_uri())
        self.mood = "takes"

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        if self.mood == "refuses":
            raise UploadError("no")
        sent = await super().put(key, file, size, sha256)
        if self.mood == "says no":
            raise UploadError("lost")
        return sent


def append(journal: Journal, now: float, *numbers: int, table: str = "steps") -> None:
    journal.append(now, lambda _: Marked([(table, {"node": "n", "steps": each}) for each in numbers]))


def send(journal: Journal, bucket: Destination) -> None:
    async def run() -> None:
        async for sequence, _ in sender.send(bucket, "c", journal):
            journal.sent([sequence])

    asyncio.run(run())


def held(folder: Path) -> Counter[int]:
    """Return how often each number is in the objects of a folder."""
    found: Counter[int] = Counter()
    for path in folder.rglob("*.jsonl.gz"):
        found.update(json.loads(line)["steps"] for line in gzip.decompress(path.read_bytes()).splitlines())
    return found


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    return folder


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.sampled_from(["append", "seal", "send", "refuses", "says no", "takes", "kill"]), max_size=30
    )
)
def test_journal_rows_reach_store_exactly_once(tmp_path_factory: Any, steps: list[str]) -> None:
    folder = tmp_path_factory.mktemp("node")
    lake = folder / "lake"
    lake.mkdir()
    journal, bucket, made = Journal(folder / "journal", "n"), Bucket(lake), 0
    for step in [*steps, "takes", "seal", "send"]:
        if step == "append":
            append(journal, NOON + made * 3600, made)
            made += 1
        elif step == "seal":
            journal.seal(NOON, JSON_LINES)
        elif step == "kill":
            # As a killed daemon: nothing is closed in order.
            journal = Journal(folder / "journal", "n")
        elif step == "send":
            try:
                send(journal, bucket)
            except UploadError:
                assert bucket.mood != "takes"
        else:
            bucket.mood = step
    assert held(lake) == Counter(range(made))
    assert journal.pending() == Pending()


def test_journal_object_names_follow_from_batch(tmp_path: Path, lake: Path) -> None:
    journal = Journal(tmp_path / "journal", "node/1")
    append(journal, NOON, 1, 2)
    append(journal, NOON + DAY, 3, table="runs")
    journal.seal(NOON, JSON_LINES)
    keys = [batch.key("east") for batch in journal.batches()]
    assert keys == [batch.key("east") for batch in Journal(tmp_path / "journal", "node/1").batches()]
    tables = [key.rpartition("/")[0] for key in keys]
    assert tables == ["table=runs/date=2024-10-05/cluster=east", "table=steps/date=2024-10-04/cluster=east"]
    assert object_name("a b", "1f", 7, PARQUET) == "a_b-1f-00000007.parquet"


def test_journal_marks_change_with_their_rows(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "n")

    def fails(_: Any) -> Marked:
        raise OSError("killed")

    journal.append(NOON, lambda mark: Marked([("runs", {"run": mark("a")})], {"a": "1"}))
    with pytest.raises(JournalError):
        journal.append(NOON, fails)
    journal.append(NOON, lambda mark: Marked([("runs", {"run": mark("a")})], {"a": "2"}))
    journal.seal(NOON, JSON_LINES)
    [batch] = journal.batches()
    lines = gzip.decompress(batch.content).splitlines()
    assert [json.loads(line)["run"] for line in lines] == [None, "1"]


def test_journal_beyond_its_bound_drops_oldest(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "n", most_bytes=300)
    dropped = 0
    for number in range(20):
        append(journal, NOON, number)
        dropped += journal.seal(NOON, JSON_LINES)
    numbers = [json.loads(gzip.decompress(batch.content))["steps"] for batch in journal.batches()]
    assert numbers == list(range(dropped, 20))
    assert 0 < journal.pending().bytes <= 300


def test_journal_damaged_file_is_set_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "n")
    append(journal, NOON, 1)
    journal.close()
    journal.path.write_bytes(b"no database" * 100)
    with pytest.raises(JournalError):
        append(journal, NOON, 2)
    append(journal, NOON, 3)
    assert journal.pending().rows == 1
    assert journal.path.with_suffix(".damaged").exists()


def test_journal_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir(mode=0o777)
    os.chmod(tmp_path / "journal", 0o777)
    with pytest.raises(JournalError, match="only this user"):
        append(Journal(tmp_path / "journal", "n"), NOON, 1)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65, "a=b"])
def test_cluster_name_that_is_no_key_is_refused(name: str) -> None:
    with pytest.raises(TorchperfdError, match="cluster"):
        check_cluster(name)


def test_sender_process_writes_parquet_of_all_tables(tmp_path: Path, lake: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    journal = Journal(tmp_path / "journal", "n")
    for name in TABLES:
        append(journal, NOON, 5, table=name)
    journal.seal(NOON, PARQUET)
    command = sender_command(lake.as_uri(), "c", str(tmp_path / "journal"), "n")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3", "4", "5"]
    for name, table in TABLES.items():
        [path] = (lake / f"table={name}").rglob("*.parquet")
        schema = parquet.read_schema(path)
        assert schema.names == [column.name for column in table.columns]


def test_sender_process_without_store_ends_with_reason(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "n")
    append(journal, NOON, 1)
    journal.seal(NOON, JSON_LINES)
    command = sender_command((tmp_path / "away").as_uri(), "c", str(tmp_path / "journal"), "n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not exist" in done.stderr
    assert journal.pending().rows == 1


def test_journal_of_another_version_is_set_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", "n")
    append(journal, NOON, 1)
    journal.close()
    with sqlite3.connect(journal.path) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalError):
        append(journal, NOON, 2)
    append(journal, NOON, 3)
    assert journal.pending().rows == 1
