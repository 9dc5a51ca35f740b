"""The edits that ``tune`` suggests: of real source text."""

from pathlib import Path

import pytest

from torchperfd_cli.tune.edits import Edits, suggest_edits
from torchperfd_cli.tune.trial import (
    AMP,
    LOADER,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    ScriptFacts,
    ScriptLoader,
    ScriptOptimizer,
    Site,
    change,
)

WORKERS = change(LOADER, num_workers=2, persistent_workers=True)
FUSED = change(OPTIMIZER, fused=True)


def edits(tmp_path: Path, source: str, line: int, *changes: Change, name: str = "DataLoader") -> Edits:
    """Suggest edits for a script whose loader, optimizer, zero_grad and threads are at one line."""
    path = tmp_path / "train.py"
    path.write_text(source)
    site = Site(str(path), line)
    facts = ScriptFacts(
        (ScriptLoader(site, name, 0, 0, False, False, False),),
        (ScriptOptimizer(site, name, True, True, None, None, 9),),
        (site,),
        threads_site=site if "set_num_threads" in source else None,
    )
    return suggest_edits(changes, facts, str(path))


def added(found: Edits) -> list[str]:
    return [
        line[1:] for line in found.diff.splitlines() if line.startswith("+") and not line.startswith("+++")
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(d)", "DataLoader(d, num_workers=2, persistent_workers=True)"),
        ("DataLoader((d), )", "DataLoader((d), num_workers=2, persistent_workers=True, )"),
        ("DataLoader(d, num_workers=0)", "DataLoader(d, num_workers=2, persistent_workers=True)"),
        ("data.DataLoader(f(d), 32)", "data.DataLoader(f(d), 32, num_workers=2, persistent_workers=True)"),
        ('DataLoader("ä", 32)', 'DataLoader("ä", 32, num_workers=2, persistent_workers=True)'),
    ],
)
def test_edit_of_loader_sets_its_arguments(tmp_path: Path, before: str, after: str) -> None:
    found = edits(tmp_path, f"x = 1\nloader = {before}\n", 2, WORKERS)
    assert added(found) == [f"loader = {after}"]
    assert found.sentences == ()


def test_edit_of_long_call_adds_lines(tmp_path: Path) -> None:
    source = "loader = DataLoader(\n    d,\n    batch_size=8,  # (small)\n)\n"
    assert added(edits(tmp_path, source, 1, WORKERS)) == [
        "    batch_size=8,",
        "    num_workers=2,",
        "    persistent_workers=True,  # (small)",
    ]


@pytest.mark.parametrize("call", ["DataLoader(d, **options)", "DataLoader(*args)", "make(d)"])
def test_edit_of_unclear_call_is_a_sentence(tmp_path: Path, call: str) -> None:
    found = edits(tmp_path, f"loader = {call}\n", 1, WORKERS)
    assert found.diff == ""
    (sentence,) = found.sentences
    assert sentence.endswith("train.py:1: write DataLoader(..., num_workers=2, persistent_workers=True)")


def test_edit_of_optimizer_takes_the_other_way_back(tmp_path: Path) -> None:
    found = edits(tmp_path, "o = SGD(p, lr=1, foreach=True)\n", 1, FUSED, name="SGD")
    assert added(found) == ["o = SGD(p, lr=1, foreach=None, fused=True)"]


@pytest.mark.parametrize("call", ["o.zero_grad(False)", "o.zero_grad(set_to_none=False)"])
def test_edit_of_zero_grad_replaces_its_argument(tmp_path: Path, call: str) -> None:
    found = edits(tmp_path, f"{call}\n", 1, change(ZERO_GRAD, set_to_none=True))
    assert added(found) == [call.replace("False", "True")]


def test_edit_of_threads_replaces_or_adds_a_line(tmp_path: Path) -> None:
    one = change(THREADS, threads=1)
    assert added(edits(tmp_path, "torch.set_num_threads(8)\n", 1, one)) == ["torch.set_num_threads(1)"]
    source = "import torch\nfrom a import (\n    b,\n)\nloader = DataLoader(b)\n"
    found = edits(tmp_path, source, 5, one, WORKERS)
    assert added(found) == [
        "",
        "torch.set_num_threads(1)",
        "loader = DataLoader(b, num_workers=2, persistent_workers=True)",
    ]
    (sentence,) = edits(tmp_path, "from torch import nn\n", 1, one).sentences
    assert sentence == "call torch.set_num_threads(1) after torch is imported"


def test_edit_of_what_has_no_line_is_a_sentence(tmp_path: Path) -> None:
    (sentence,) = edits(tmp_path, "pass\n", 1, change(AMP)).sentences
    assert "torch.autocast" in sentence
    found = suggest_edits([WORKERS], ScriptFacts(), "")
    assert found.diff == ""
    assert len(found.sentences) == 1
