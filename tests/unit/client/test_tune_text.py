"""The output of ``tune``, of a result that is made up."""

from dataclasses import replace

import pytest
from tests.support.golden import check_golden

from torchperfd.model.loader_workers import LoaderAdvice
from torchperfd_cli.bench.functions import Comparison
from torchperfd_cli.commands.tune import tune_document, tune_text
from torchperfd_cli.tune.edits import Edits
from torchperfd_cli.tune.search import Dropped, Kept, Tuning
from torchperfd_cli.tune.trial import (
    LOADER,
    OPTIMIZER,
    THREADS,
    LossCheck,
    ScriptFacts,
    ScriptLoader,
    ScriptOptimizer,
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
    check_golden("tune.txt", tune_text(tuned(), edits, 64.0) + "\n")


def test_tune_text_folds_all_but_the_diff() -> None:
    diff = (
        DIFF + "+loader = DataLoader(images, 32, num_workers=4, persistent_workers=True, prefetch_factor=4)\n"
    )
    edits = Edits(
        diff, ("scripts/of/everyone/train.py:9: write AdamW(..., fused=True), and nothing else there",)
    )
    found = replace(tuned(), ended="time", skipped=["zero_grad: it has 0.4% of a step, " * 4])
    lines = tune_text(found, edits, 64.0, 80).splitlines()
    wide = [line for line in lines if len(line) > 80]
    assert wide == [f"  {diff.splitlines()[-1]}"]
    assert "          time: --limit)" in lines
    assert tune_text(found, edits, 64.0, 80).split() == tune_text(found, edits, 64.0).split()


def test_tune_text_of_nothing_kept_has_no_edit() -> None:
    found = replace(tuned(), kept=[], total=None, ended="time", repeated="any")
    text = tune_text(found, Edits("", ()), 900.0)
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
    lines = tune_text(found, Edits(DIFF, ()), 900.0).splitlines()
    at = lines.index(f"tuned     not verified in new processes: {why}")
    assert lines[at + 1] == "          the gains below are of one pair of processes for each change"


def test_tune_text_of_nothing_kept_has_the_best() -> None:
    dropped = [
        Dropped(change(THREADS, threads=1), "slower", Comparison(1.4, 1.3, 1.5)),
        Dropped(change(OPTIMIZER, fused=True), "no certain gain", Comparison(0.98, 0.95, 1.01)),
        Dropped(change(OPTIMIZER, foreach=True), "slower in a first run"),
    ]
    found = replace(tuned(), kept=[], total=None, dropped=dropped)
    lines = tune_text(found, Edits("", ()), 900.0).splitlines()
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
