"""One rule and one prediction for the same facts: live verdict, analyser, ``bench`` and ``tune``."""

import inspect
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from tests.unit.daemon import traces

from torchperfd.model.loader_facts import LoaderAdvice, LoaderFacts, WorkerCost
from torchperfd_cli.bench.loader_bench import LoaderBench
from torchperfd_cli.bench.loader_process import LoaderDescription, LoaderSetting, RestOfStep, Speed
from torchperfd_cli.bench.search import with_workers
from torchperfd_cli.tune import candidates
from torchperfd_cli.tune.trial import LOADER, THREADS, ScriptFacts, ScriptLoader, Trial
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import rules
from torchperfd_daemon.analysis.advice.updating import TORCH_OPTIMIZERS
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.remedies import RuleCounsel
from torchperfd_daemon.diagnosis.verdicts import diagnose
from torchperfd_daemon.doctor import checks
from torchperfd_daemon.doctor.facts import CpuFacts, Facts, RankFacts
from torchperfd_daemon.loader_workers import advise_loader, predict_step

MS = 1e-3
COST = WorkerCost(0.2 * MS, 0.2 * MS, 0.2e-9, 0.2 * MS, 0.15 * MS, 0.5e-9)
COMPUTES = LoaderFacts(
    cpus=4.0, draw_cpu=1.0, rest_cpus=1.0, batch_tensors=2, batch_bytes=8448, batch_size=32
)
WAITS = replace(COMPUTES, draw_cpu=0.04)
TENSORS = replace(COMPUTES, indexable=True, shuffles=True)

CASES: dict[str, tuple[LoaderFacts, float, float]] = {
    "computes": (COMPUTES, 40 * MS, 30 * MS),
    "waits": (WAITS, 170 * MS, 150 * MS),
    "crowded": (replace(WAITS, queued=0.5), 170 * MS, 150 * MS),
    "whole-batches": (TENSORS, 1.5 * MS, 1 * MS),
    "nothing-to-gain": (COMPUTES, 40 * MS, 0.2 * MS),
}


def of_the_analyser(facts: LoaderFacts, step: float, data: float) -> tuple[str, float]:
    step_ns, data_ns = round(step * 1e9), round(data * 1e9)
    events = []
    for number in range(4):
        at = number * step_ns
        draw = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        events += [
            traces.event(f"ProfilerStep#{number}", at, at + step_ns, cat="user_annotation"),
            traces.event(draw, at, at + data_ns, cat="user_annotation"),
        ]
    own: dict[str, Any] = {
        "unrecorded_step_ns": step_ns,
        "unrecorded_phase_ns": {"data": data_ns},
        "loader": asdict(facts),
    }
    trace = traces.trace_of(events, torchperfd=own)
    found = [
        each
        for each in analysis.summarise(trace, worker_cost=lambda: COST).advice
        if each.rule in ("loader-workers", "whole-batches")
    ]
    return (found[0].setting, found[0].saves_ns_per_step / 1e9) if found else ("", 0.0)


def of_the_live_verdict(facts: LoaderFacts, step: float, data: float) -> tuple[str, float]:
    found = diagnose(
        "r",
        [RankEvidence(0, "node-a", step, {"data": data}, steps=100, loader=facts)],
        RuleCounsel(lambda: COST),
    )
    return (found.fix, found.saves_seconds) if found.saves_seconds else ("", 0.0)


def of_bench(facts: LoaderFacts, step: float, data: float) -> LoaderAdvice | None:
    own = LoaderSetting(0, 32)
    speed = Speed(32 / step, 0.0, step, data, 0.1, 100, facts.batch_bytes, facts)
    described = LoaderDescription(own, True, True, 4.0, False)
    return LoaderBench("train:loader", described, {own: speed}, own, None, 1.0, True, COST).advice


def of_tune(facts: LoaderFacts, step: float, data: float) -> LoaderAdvice | None:
    return Trial(step, 100, {"data": data}, loader=facts).loader_advice(COST)


@pytest.mark.parametrize("name", CASES)
def test_loader_rule_is_one_for_all_that_advise(name: str) -> None:
    case = CASES[name]
    expected = advise_loader(*case, COST)
    assert (expected is None) is (name == "nothing-to-gain")
    setting, saves = (expected.setting, expected.saves_seconds) if expected else ("", 0.0)
    fix, promised = of_the_live_verdict(*case)
    assert fix.startswith(setting)
    assert promised == pytest.approx(saves)
    advised, gain = of_the_analyser(*case)
    assert advised == setting
    assert gain == pytest.approx(saves, rel=1e-6)
    assert of_bench(*case) == expected
    assert of_tune(*case) == expected


@pytest.mark.parametrize("name", ["computes", "waits", "crowded"])
def test_loader_rule_prediction_of_bench_is_the_same(name: str) -> None:
    """What the advice promises for its number of workers, ``bench`` predicts for that number."""
    facts, step, data = CASES[name]
    expected = advise_loader(facts, step, data, COST)
    assert expected is not None
    assert predict_step(facts, step, data, expected.workers, COST) == expected.step_seconds
    own = LoaderSetting(0, 32)
    speed = Speed(32 / step, 0.0, step, data, 0.1, 100, facts.batch_bytes, facts)
    described = LoaderDescription(own, True, True, 4.0, False)
    bench = LoaderBench("train:loader", described, {own: speed}, own, None, 1.0, True, COST)
    assert bench.predicted_seconds(with_workers(own, expected.workers)) == expected.step_seconds


def test_loader_rule_of_bench_counts_the_rest_it_knows() -> None:
    """A loader measured by itself, beside a job whose steps take 10 ms without it."""
    own, facts = LoaderSetting(0, 32), WAITS
    speed = Speed(32 / 0.15, 0.0, 0.15, 0.15, 0.1, 100, facts.batch_bytes, facts)
    described = LoaderDescription(own, True, False, 4.0, False)
    bench = LoaderBench("Data", described, {own: speed}, own, RestOfStep(0.01), 1.0, True, COST)
    assert bench.advice == advise_loader(facts, 0.16, 0.15, COST)


def test_loader_rule_number_is_among_what_tune_tries() -> None:
    for name in ("computes", "waits", "crowded"):
        facts, step, data = CASES[name]
        expected = advise_loader(facts, step, data, COST)
        assert expected is not None
        script = ScriptFacts((ScriptLoader(None, "DataLoader", 0, 0, False, False, False),), cpus=4.0)
        trial = Trial(step, 100, {"data": data}, facts=script, loader=facts)
        groups, _ = candidates.propose(trial, (), candidates.Requested(only=(LOADER,)), expected)
        tried = [dict(each.values).get("num_workers") for group in groups for each in group.changes]
        assert expected.workers in tried


def test_loader_prediction_of_other_loops_is_unknown() -> None:
    with_two = replace(WAITS, workers=2, receive_seconds=0.6 * MS, worker_cpu_seconds=1 * MS)
    assert predict_step(with_two, 40 * MS, 20 * MS, 0, COST) is None
    assert predict_step(with_two, 40 * MS, 20 * MS, 2, COST) == 40 * MS
    assert predict_step(replace(WAITS, cpus=-1.0), 40 * MS, 20 * MS, 2, COST) is None


def test_fused_rule_knows_the_optimizers_that_tune_fuses() -> None:
    """The analyser has no torch to ask; ``tune`` reads the signatures."""
    fusing = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and "fused" in inspect.signature(kind.__init__).parameters
    }
    assert fusing == {name for name, kind in TORCH_OPTIMIZERS.items() if "cpu" in kind.fused_on}


def test_least_share_of_tune_is_that_of_the_analyser() -> None:
    assert candidates.MIN_SHARE == rules.MIN_SHARE


def test_threads_of_the_doctor_are_among_what_tune_tries() -> None:
    cpu = CpuFacts(cpus=4, busy=1.0, runnable=9, stolen=0.0, pressure=0.9, consumers=())
    rank = RankFacts("bert", 0, 41, frozenset(range(4)), threads=16)
    (finding,) = checks.check_cpu_pressure(Facts(ranks=(rank,), cpu=cpu))
    script = ScriptFacts(threads=16, cpus=4.0)
    groups, _ = candidates.propose(Trial(0.1, 100, facts=script), (), candidates.Requested(only=(THREADS,)))
    tried = [dict(each.values)["threads"] for group in groups for each in group.changes]
    assert any(f"OMP_NUM_THREADS={threads}`" in finding.fix for threads in tried)
