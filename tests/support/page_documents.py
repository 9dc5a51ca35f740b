"""Runs and captures for tests of pages: two of each, of which the second is slower."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run_comparison.simulation import simulate

from tests.support.accounts import uneven_account
from tests.support.run_documents import document_of, run_file
from tests.unit.daemon.kept import add
from tests.unit.daemon.traces import document, event
from torchperfd_daemon.captures.catalog import Catalog

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror="document.title=1">'
CAPTURES = ("20260101-000000-aaaaaa", "20260102-000000-bbbbbb")


def trace(lengths: Sequence[int], extra: str, gemm: str = "void gemm<float>()") -> bytes:
    """Return a trace: a step for each length in ns, in which a kernel, some operators and ``extra`` run."""
    events, at = [], 1
    for number, length in enumerate(lengths):
        linked = {"External id": number + 1}
        events += [
            event(f"ProfilerStep#{number}", at, at + length + 900_000, cat="user_annotation"),
            event("aten::mm", at + 1000, at + length, args=linked),
            event(gemm, at + 2000, at + length, cat="kernel", thread=7, args=linked),
            event(extra, at + length, at + length + 200_000),
            event("Optimizer.step#SGD.step", at + length + 300_000, at + length + 500_000),
        ]
        small = at + length + 550_000
        events += [
            event(f"aten::op{each}", small + 9000 * each, small + 9000 * each + 5000) for each in range(8)
        ]
        at += length + 900_000
    return document(events).encode()


FAST = (2_000_000, 2_010_000, 2_005_000, 1_995_000)
SLOW = (3_000_000, 3_010_000, 2_990_000)


def two_captures(directory: Path, *, ranks: int = 1) -> Catalog:
    """Make a directory with two captures; the second one's kernel takes longer, and an operator is new."""
    catalog = Catalog(directory)
    for capture_id, lengths, extra, run in (
        (CAPTURES[0], FAST, "aten::relu", "bert-17"),
        (CAPTURES[1], SLOW, HOSTILE, f"bert-18 {HOSTILE}"),
    ):
        contents = {rank: trace(lengths, extra) for rank in range(ranks)}
        add(catalog, capture_id, contents, run=run, world_size=ranks)
    return catalog


def two_runs() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return reports of two runs; in the second one backward is longer, and torch is newer."""
    source = random.Random(8)
    one, other = (
        document_of(simulate(source, steps=600, planted=planted)) | {"run": run}
        for run, planted in (("train-3f2a", {}), ("slow-11", {"backward": 0.1}))
    )
    other["versions"] = other["versions"] | {"torch": f"2.14.0 {HOSTILE}"}
    return one, other


def long_run(ranks: int = 4) -> dict[str, Any]:
    """Return the report of a run of several ranks, of which the last is slow, with all that a page shows."""
    found = []
    for rank in range(ranks):
        wait = 0.0 if rank == ranks - 1 else 0.02
        seconds = {"data": 0.004, "forward": 0.05 - wait, "backward": 0.06, "optimizer": 0.008}
        seconds["collective_wait"] = wait
        (one,) = run_file("ddp", steps=400, seconds=seconds, rank=rank)["ranks"]
        one["validate"] = {
            "steps": 20,
            "step_seconds_total": 0.8,
            "phases": {"forward": {"calls": 20, "seconds_total": 0.8}},
        }
        one["checkpoint"] = {"calls": 3, "seconds_total": 2.4}
        one["fit"] = {"seconds_total": 55.0, "between_seconds": 4.0}
        one["cuda"] = {"allocated_bytes": 2**31, "reserved_bytes": 2**32, "peak_bytes": 3 * 2**30}
        found.append(one)
    verdict = {
        "cause": "slow rank",
        "summary": f"rank {ranks - 1} does 20 ms more work in each step",
        "evidence": f"rank {ranks - 1} does 20 ms more work in each step, most of it in forward {HOSTILE}",
        "rank": ranks - 1,
        "node": "gpu-17",
        "cost_seconds_per_step": 0.02,
        "step_seconds": 0.122,
        "fix": f"torchperfd stacks --ranks {ranks - 1}",
        "saves_seconds": 0.02,
        "note": f"busy node: everything takes 3.5 times as long {HOSTILE}",
        "account": uneven_account().to_document(),
    }
    document: dict[str, Any] = run_file("ddp", steps=400, seconds={"forward": 0.1})
    environment = {**document["environment"], "device": "NVIDIA H100 80GB HBM3"}
    return document | {
        "ranks": found,
        "verdict": verdict,
        "world_size": ranks,
        "environment": environment,
    }
