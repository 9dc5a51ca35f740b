"""One sentence for each kind of file that is easily taken for a trace."""

import bz2
import json
import lzma
import pickle
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.golden import GOLDEN

from torchperfd_cli import main

TRITON = b'[{"id":1,"model_name":"simple","model_version":1,"timestamps":[{"name":"REQUEST_START","ns":5}]}]'
DUMP = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []})


@pytest.fixture
def analyze(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return exit code, stdout and stderr."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        code = main.run_command(["analyze", *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("nccl_trace_rank_0", DUMP, "is a Flight Recorder dump"),
        ("trace.json", TRITON, "is a request trace of Triton Inference Server"),
        ("report.nsys-rep", b"\x00\x01", "is a report of Nsight Systems"),
        ("kernels.ncu-rep", b"NVR\x00", "is a report of Nsight Compute"),
        ("events.out.tfevents.17.host", b"\x18", "is a log of TensorBoard"),
        ("trace.json.bz2", bz2.compress(b"{}"), "is compressed with bzip2"),
        ("model.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "is a checkpoint of torch.save"),
        ("et.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [', "is an execution trace of torch"),
        (
            "prof.json",
            b'{"$schema":"https://www.speedscope.app/file-format-schema.json",',
            "is a profile for speedscope",
        ),
    ],
)
def test_foreign_file_has_its_own_sentence(
    analyze: Any, tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, out, err = analyze(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"torchperfd: {path} {what}")
    assert err.count("\n") == 1


def test_archives_and_databases_are_named_by_content(analyze: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as archive:
        archive.writestr("model/data.pkl", b"x")
    assert "is a checkpoint of torch.save" in analyze(tmp_path / "a")[2]
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("trace.json", b"{}")
    assert "is a zip archive, no trace; extract it first" in analyze(tmp_path / "b")[2]
    with sqlite3.connect(tmp_path / "c.sqlite") as database:
        database.execute("create table a(b)")
    assert "open it with `nsys stats`" in analyze(tmp_path / "c.sqlite")[2]


@pytest.mark.parametrize("name", ["trace.json.zst", "rank0.pickle.zst"])
def test_zstd_without_a_reader_is_named(
    analyze: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd" + bytes(40))
    code, _, err = analyze(tmp_path / name)
    assert code == 1
    assert f"{tmp_path / name} is compressed with zstd, which Python reads from 3.14 on; decompress it" in err


def test_xz_trace_is_read_like_the_plain_one(analyze: Any, tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.xz"
    packed.write_bytes(lzma.compress((GOLDEN / "trace_small.json").read_bytes()))
    plain = json.loads(analyze(GOLDEN / "trace_small.json", "--json")[1])
    assert json.loads(analyze(packed, "--json")[1])["ranks"][0]["operators"] == plain["ranks"][0]["operators"]


def test_directory_of_dumps_is_sent_to_stacks(analyze: Any, tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(DUMP)
    code, _, err = analyze(tmp_path)
    assert code == 2
    assert f"`torchperfd stacks --from {tmp_path}` names the rank" in err


def test_trace_that_has_such_words_is_still_a_trace(analyze: Any, tmp_path: Path) -> None:
    trace = (GOLDEN / "trace_small.json").read_bytes().replace(b"{", b'{"nodes": 1, "schema": 2, ', 1)
    (tmp_path / "trace.json").write_bytes(trace)
    assert analyze(tmp_path / "trace.json")[0] == 0
