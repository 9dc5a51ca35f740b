"""The result of `tune`: its text, and the edits that it proposes."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.golden import check_golden

from torchperfd.document.terminal import Page, render
from torchperfd.model.loader_facts import LoaderAdvice
from torchperfd_cli.bench.functions import Comparison
from torchperfd_cli.commands.tune import people_document, tune_document
from torchperfd_cli.tune.edits import Edits, suggest_edits
from torchperfd_cli.tune.search import Dropped, Kept, Tuning
from torchperfd_cli.tune.trial import (
    AMP,
    LOADER,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    LossCheck,
    ScriptFacts,
    ScriptLoader,
    ScriptOptimizer,
    Site,
    Trial,
    change,
)

DIFF = """\
--- a/train.py
+++ b/train.py
@@ -8,1 +8,1 @@
-loader = DataLoader(images, 32)
+loader = DataLoader(images, 32, num_workers=4, persistent_workers=True)
"""


def tuned() -> Tuning:
    facts = ScriptFacts(
        (ScriptLoader(None, "DataLoader", 0, 0, False, False, False),),
        (ScriptOptimizer(None, "AdamW", True, True, None, None, 40),),
    )
    unchanged = Trial(0.0512, 40, {"data": 0.04}, facts=facts)
    return Tuning(
        unchanged,
        "exact",
        [
            Kept(
                change(LOADER, num_workers=4, persistent_workers=True),
                Comparison(0.25, 0.24, 0.26),
                LossCheck("equal", True, "first 10 losses equal"),
            ),
            Kept(
                change(OPTIMIZER, fused=True),
                Comparison(0.8, 0.78, 0.82),
                LossCheck("close", True, "first 10 losses equal within 0.0001"),
            ),
        ],
        [Dropped(change(THREADS, threads=1), "slower: takes 1.40 times as long, in 3 pairs")],
        ["zero_grad: it has 0.4% of a step"],
        Comparison(0.2, 0.19, 0.21),
        advice=LoaderAdvice(
            "loader-workers", 4, 0.013, 0.0382, "use workers", "DataLoader(..., num_workers=4)"
        ),
    )


def test_tune_text_shows_gain_losses_and_edit() -> None:
    edits = Edits(DIFF, ("train.py:9: write AdamW(..., fused=True)",))
    check_golden("tune.txt", render(people_document(tuned(), edits, 64.0)) + "\n")


def test_tune_text_folds_all_but_the_diff() -> None:
    diff = (
        DIFF + "+loader = DataLoader(images, 32, num_workers=4, persistent_workers=True, prefetch_factor=4)\n"
    )
    edits = Edits(
        diff, ("scripts/of/everyone/train.py:9: write AdamW(..., fused=True), and nothing else there",)
    )
    found = replace(tuned(), ended="time", skipped=["zero_grad: it has 0.4% of a step, " * 4])
    lines = render(people_document(found, edits, 64.0), Page(80)).splitlines()
    wide = [line for line in lines if len(line) > 80]
    assert wide == [f"  {diff.splitlines()[-1]}"]
    assert "          time: --limit)" in lines
    assert (
        render(people_document(found, edits, 64.0), Page(80)).split()
        == render(people_document(found, edits, 64.0)).split()
    )


def test_tune_text_of_nothing_kept_has_no_edit() -> None:
    found = replace(tuned(), kept=[], total=None, ended="time", repeated="any")
    text = render(people_document(found, Edits("", ()), 900.0))
    assert "nothing that was tried is certainly faster" in text
    assert "by the time limit" in text
    assert "losses    not checked" in text
    assert "edit" not in text.splitlines()


@pytest.mark.parametrize(
    ("ended", "unverified", "why"),
    [
        ("time", "", "the time limit came before these"),
        ("interrupted", "", "Ctrl-C came before these"),
        ("", "the script is too short", "these failed: the script is too short"),
    ],
)
def test_tune_text_has_why_nothing_is_verified(ended: str, unverified: str, why: str) -> None:
    found = replace(tuned(), total=None, ended=ended, unverified=unverified)
    lines = render(people_document(found, Edits(DIFF, ()), 900.0)).splitlines()
    at = lines.index(f"tuned     not verified in new processes: {why}")
    assert lines[at + 1] == "          the gains below are of one pair of processes for each change"


def test_tune_text_of_nothing_kept_has_the_best() -> None:
    dropped = [
        Dropped(change(THREADS, threads=1), "slower", Comparison(1.4, 1.3, 1.5)),
        Dropped(change(OPTIMIZER, fused=True), "no certain gain", Comparison(0.98, 0.95, 1.01)),
        Dropped(change(OPTIMIZER, foreach=True), "slower in a first run"),
    ]
    found = replace(tuned(), kept=[], total=None, dropped=dropped)
    lines = render(people_document(found, Edits("", ()), 900.0)).splitlines()
    assert "best      AdamW(..., fused=True): 1.02 times as fast (95 %: 0.99 to 1.05)" in lines
    document = tune_document(found, Edits("", ()), 900.0)
    assert [each["speedup"] is None for each in document["not_kept"]] == [False, False, True]


def test_tune_document_has_speedups_as_ratios() -> None:
    document = tune_document(tuned(), Edits(DIFF, ()), 64.0)
    assert document["speedup"]["low"] < document["speedup"]["ratio"] == 5.0
    assert [each["code"] for each in document["kept"]] == [
        "DataLoader(..., num_workers=4, persistent_workers=True)",
        "AdamW(..., fused=True)",
    ]
    assert document["kept"][0]["losses"] == "equal"
    assert document["is_complete"]


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
