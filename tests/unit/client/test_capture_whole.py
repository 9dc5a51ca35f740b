"""A truncated trace is distinguished from a whole one, without reading all of it."""

from pathlib import Path

import pytest
import torch

from torchperfd.captures.rank_files import _is_whole


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "whole.json"
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        for _ in range(20):
            torch.ones(4).sum()
    profiler.export_chrome_trace(str(path))
    return path.read_bytes()


def is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        return _is_whole(file)


def test_what_kineto_writes_is_whole(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(trace)
    assert is_whole(path)


def test_no_beginning_of_it_is(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    *braces, _ = [position for position, byte in enumerate(trace) if byte == ord("}")]
    # After a brace is where a cut looks most like an end.
    for end in [0, 1, len(trace) // 2, *(brace + 1 for brace in braces[::7]), braces[-1] + 1]:
        path.write_bytes(trace[:end])
        assert not is_whole(path), end
