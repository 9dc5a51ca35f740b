"""Every cause says what to change."""

from dataclasses import replace

import pytest

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_daemon.diagnosis.remedies import contention_remedy, fix_of, loader_remedy
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.service.translate_diagnosis import (
    percentiles_to_messages,
    run_verdict_to_message,
)
from torchperfd_daemon.service.translate_verdict import verdict_to_message
from torchperfd_daemon.store.model import RankIdentity, StepColumns
from torchperfd_daemon.store.store import Store


def verdict_on(cause: Cause) -> Verdict:
    return Verdict(cause, "bert-17", "node-a", None, "", "words", 0.1, "torchperfd ps")


def shown_fixes(message: control_pb2.Verdict) -> list[str]:
    """Return the fixes of a verdict and of its further causes as documents have them."""
    document = verdict_to_document(message)
    return [each["fix"] for each in (document, *document["others"])]


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause not in (Cause.NONE, Cause.UNKNOWN)])
def test_every_cause_has_a_fix_in_its_message(cause: Cause) -> None:
    message = verdict_to_message(verdict_on(cause))
    assert message.fix
    assert message.fix.isprintable()


def test_predicted_fix_replaces_the_usual_one() -> None:
    predicted = replace(verdict_on(Cause.INPUT_BOUND), fix="DataLoader(num_workers=2)", saves_seconds=0.05)
    message = verdict_to_message(replace(verdict_on(Cause.CHECKPOINT), others=(predicted,)))
    assert message.others[0].fix == fix_of(predicted) == "DataLoader(num_workers=2)"
    assert message.others[0].saves_seconds == 0.05


@pytest.mark.parametrize("cause", [Cause.NONE, Cause.UNKNOWN])
def test_no_cause_has_nothing_to_fix(cause: Cause) -> None:
    assert verdict_to_message(verdict_on(cause)).fix == ""


@pytest.mark.parametrize(
    ("cpus", "rest_cpus", "queued", "setting"),
    [
        (1.0, 1.0, 0.5, "OMP_NUM_THREADS=1 (now about 2 threads compute in each rank); or "),
        (4.0, 4.0, 0.5, "OMP_NUM_THREADS=4 (now about 8 threads compute in each rank); or "),
        (0.5, 0.5, 0.75, "OMP_NUM_THREADS=1 (now about 2 threads compute in each rank); or "),
        (2.0, 1.0, 0.5, ""),
        (1.0, 1.0, 0.0, ""),
        (0.5, 0.5, 0.5, ""),
        (1.0, None, 0.5, ""),
        (1.0, 1.0, None, ""),
        (None, 1.0, 0.9, ""),
    ],
)
def test_contention_remedy_names_threads_beyond_the_cpus(
    cpus: float | None, rest_cpus: float | None, queued: float | None, setting: str
) -> None:
    remedy = contention_remedy(LoaderFacts(cpus=cpus, rest_cpus=rest_cpus, queued=queued))
    assert remedy.fix == setting + fix_of(verdict_on(Cause.CPU_CONTENTION))
    assert remedy.saves_seconds == 0
    assert "`torchperfd tune --only threads SCRIPT`" in remedy.fix


@pytest.mark.parametrize(
    ("threads", "rest_cpus", "queued", "setting"),
    [
        (8, 4.0, 0.5, "torch.set_num_threads(4) (now 8); or "),
        (5, 4.0, 0.5, "torch.set_num_threads(4) (now 5); or "),
        (4, 4.0, 0.5, ""),
        (8, 1.0, 0.5, ""),
        (8, None, 0.5, ""),
        # Other programs have three of the four CPUs.
        (8, 1.0, 0.9, ""),
        (None, 1.0, 0.9, ""),
    ],
)
def test_contention_remedy_knows_the_threads_in_effect(
    threads: int | None, rest_cpus: float | None, queued: float, setting: str
) -> None:
    facts = LoaderFacts(cpus=4.0, rest_cpus=rest_cpus, queued=queued)
    assert contention_remedy(facts, threads).fix == setting + fix_of(verdict_on(Cause.CPU_CONTENTION))


def test_contention_remedy_shared_cpu_keeps_two_threads() -> None:
    """A CPU and a half are more than one thread can use."""
    fixes = [contention_remedy(LoaderFacts(cpus=1.5), threads).fix for threads in (2, 3)]
    assert [fix.startswith("torch.set_num_threads(1) (now 3)") for fix in fixes] == [False, True]


def test_contention_remedy_has_no_advice_that_cannot_help() -> None:
    more = "end or move the other programs on this node, or give the job more cores"
    single, distributed = contention_remedy(None, 1).fix, contention_remedy(LoaderFacts(), 4, ranks=2).fix
    assert single == distributed == contention_remedy(None, on_device=True).fix == more
    loading = contention_remedy(LoaderFacts(workers=2), 1).fix
    assert loading == f"use fewer loader workers (num_workers); or {more}"


def test_loader_remedy_of_many_ranks_tunes_no_script() -> None:
    alone, distributed = (loader_remedy(None, 0.1, 0.05, ranks=ranks) for ranks in (1, 2))
    assert "`torchperfd tune SCRIPT`" in fix_of(replace(verdict_on(Cause.INPUT_BOUND), fix=alone.fix))
    assert distributed.fix.startswith("do less for each sample in __getitem__")


def test_fix_of_contention_names_the_script_to_tune() -> None:
    ranks = [Store().join(RankIdentity("bert-17", 0, script="train.py"))]
    crowded = contention_remedy(LoaderFacts(cpus=1.0, rest_cpus=1.0, queued=0.5)).fix
    starved = replace(verdict_on(Cause.CPU_CONTENTION), fix=crowded)
    message = run_verdict_to_message(replace(verdict_on(Cause.INPUT_BOUND), others=(starved,)), ranks)
    first, second = shown_fixes(message)
    assert first.startswith("`torchperfd tune train.py` tries")
    assert "; or `torchperfd tune --only threads train.py` measures" in second
    assert (message.script, message.others[0].fix) == ("train.py", crowded)


def test_percentiles_are_of_steps_and_phases() -> None:
    from array import array

    steps = StepColumns(array("q", range(101)), array("q", range(101)), {"data": array("q", [7] * 101)})
    found = {each.phase: (each.p50_ns, each.p95_ns) for each in percentiles_to_messages(steps)}
    assert found == {"": (50, 95), "data": (7, 7)}


def test_percentiles_without_steps_are_none() -> None:
    from array import array

    assert percentiles_to_messages(StepColumns(array("q"), array("q"), {})) == []


def test_fix_names_the_script_of_the_run() -> None:
    def fix(script: str) -> str:
        rank = Store().join(RankIdentity("bert-17", 0, script=script))
        found = replace(verdict_on(Cause.CHECKPOINT), others=(verdict_on(Cause.INPUT_BOUND),))
        return shown_fixes(run_verdict_to_message(found, [rank]))[1]

    assert fix("train.py").startswith("`torchperfd tune train.py` tries settings")
    assert fix("my job.py").startswith("`torchperfd tune 'my job.py'` tries settings")
    for unknown in ("", "python", "__main__.py", "a\x1b[m.py"):
        assert fix(unknown).startswith("`torchperfd tune SCRIPT` tries settings")


def test_fix_of_an_ended_run_names_its_script() -> None:
    rank = Store().join(RankIdentity("bert-17", 0, script="train.py"))
    message = run_verdict_to_message(verdict_on(Cause.INPUT_BOUND), (), ended=[rank])
    assert shown_fixes(message)[0].startswith("`torchperfd tune train.py` tries")
