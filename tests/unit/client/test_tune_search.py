"""The search of ``tune``: which changes are tried, kept and dropped. With a script that is made up."""

import dataclasses
import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import msgspec
import pytest

from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts
from torchperfd_cli.tune.candidates import Requested, propose
from torchperfd_cli.tune.search import (
    HOPELESS_ROUNDS,
    MAX_FRESH,
    MAX_ROUNDS,
    MIN_FRESH,
    MIN_ROUNDS,
    Tuning,
    TuningSearch,
)
from torchperfd_cli.tune.trial import (
    LOADER,
    MATMUL,
    OPTIMIZER,
    THREADS,
    ZERO_GRAD,
    Change,
    ScriptFacts,
    ScriptLoader,
    ScriptOptimizer,
    Site,
    Trial,
    change,
    check_losses,
    merged,
    repeats,
)
from torchperfd_cli.tune.trial_process import PAIRS_PER_PROCESS, TrialFailedError

LOSSES = (2.0, 1.5, 1.25, 1.0)
WORKERS = change(LOADER, num_workers=2, persistent_workers=True)
FUSED = change(OPTIMIZER, fused=True)
FOREACH = change(OPTIMIZER, foreach=True)
NONE = change(ZERO_GRAD, set_to_none=True)
Cost = Callable[[frozenset[Change]], float]


def loader(workers: int = 0, *, is_iterable: bool = False) -> ScriptLoader:
    return ScriptLoader(Site("a.py", 3), "DataLoader", workers, 2 * bool(workers), False, False, is_iterable)


def optimizer(fused: bool | None = None, tensors: int = 50) -> ScriptOptimizer:
    return ScriptOptimizer(Site("a.py", 4), "AdamW", True, True, fused, None, tensors)


def made_up(
    *,
    data: float = 0.0,
    optimizer_seconds: float = 0.0,
    facts: ScriptFacts | None = None,
    losses: tuple[float, ...] = LOSSES,
) -> Trial:
    """Return a run with a step of 100 ms, of which so much is one phase."""
    phases = {"data": data, "optimizer": optimizer_seconds, "backward": 0.1 - data - optimizer_seconds}
    return Trial(0.1, 20, phases, losses, (1, 2, 3, 4), facts or ScriptFacts(threads=1))


class FakeTrials:
    """A script whose steps take what a function of the changes returns, with noise that repeats."""

    noise = (1.0, 1.004, 0.997, 1.002, 0.999, 1.001, 0.996)

    def __init__(self, unchanged: Trial, factor: Cost) -> None:
        self._unchanged = unchanged
        self.factor = factor
        self._count = 0
        self.losses: Callable[[frozenset[Change]], tuple[float, ...]] = lambda _: unchanged.losses
        self.batches: Callable[[frozenset[Change]], tuple[int, ...]] = lambda _: unchanged.batches
        self.fails: frozenset[Change] = frozenset()
        self.interrupts_after = 10**6
        self.measured: list[frozenset[Change]] = []
        self.open = 0
        self.fresh: list[frozenset[Change]] = []
        self.fresh_factor = 1.0

    def run(self, changes: Sequence[Change]) -> Trial:
        if self.fails & set(changes):
            raise TrialFailedError("the script raised RuntimeError: no")
        seconds = self._seconds(changes)
        factor = seconds / self._unchanged.step_seconds
        return replace(
            self._unchanged,
            step_seconds=seconds,
            phases={name: factor * each for name, each in self._unchanged.phases.items()},
            losses=self.losses(frozenset(changes)),
            batches=self.batches(frozenset(changes)),
        )

    def pairs(
        self, without: Sequence[Change], with_it: Sequence[Change]
    ) -> Generator[tuple[float, float], None, None]:
        self.open += 1
        try:
            while True:
                yield self._seconds(without), self._seconds(with_it)
        finally:
            self.open -= 1

    def fresh_pairs(
        self, without: Sequence[Change], with_it: Sequence[Change]
    ) -> Generator[tuple[float, float], None, None]:
        for first, second in self.pairs(without, with_it):
            self.fresh.append(frozenset(with_it))
            yield first, second * self.fresh_factor

    def _seconds(self, changes: Sequence[Change]) -> float:
        self._count += 1
        if self._count > self.interrupts_after:
            raise KeyboardInterrupt
        self.measured.append(frozenset(changes))
        noise = self.noise[self._count % len(self.noise)]
        return noise * self._unchanged.step_seconds * self.factor(frozenset(changes))


def tune(trials: FakeTrials, requested: Requested | None = None, budget: float = 1e9) -> Tuning:
    """Tune with a clock that shows the number of measurements."""
    clock = lambda: float(len(trials.measured))  # noqa: E731
    return TuningSearch(trials, requested or Requested(), clock, budget, lambda _: None).tune()


def two_ways() -> FakeTrials:
    """Return a script that workers make faster by half, and a fused optimizer then by a quarter."""

    def factor(changes: frozenset[Change]) -> float:
        has_workers = any(each.target == LOADER for each in changes)
        return (0.5 if has_workers else 1.0) * (0.75 if FUSED in changes else 1.0)

    facts = ScriptFacts((loader(),), (optimizer(),), threads=1, cpus=1.0)
    return FakeTrials(made_up(data=0.05, optimizer_seconds=0.03, facts=facts), factor)


def test_search_keeps_what_is_faster_and_adds_to_it() -> None:
    trials = two_ways()
    found = tune(trials)
    assert {each.change.target for each in found.kept} == {LOADER, OPTIMIZER}
    assert found.total is not None
    assert found.total.low < 0.5 * 0.75 < found.total.high
    # The second is measured with the first one.
    second = found.kept[1].change
    assert all(
        any(each.target == found.kept[0].change.target for each in changes)
        for changes in trials.measured
        if second in changes
    )
    assert not found.ended
    assert trials.open == 0


def test_search_verifies_single_change_in_new_processes() -> None:
    trials = two_ways()
    found = tune(trials, Requested(only=(OPTIMIZER,)))
    assert [each.change for each in found.kept] == [FUSED]
    assert found.total is not None
    assert trials.fresh == [frozenset({FUSED})] * MIN_FRESH


def test_search_drops_gain_that_new_processes_lack() -> None:
    trials = two_ways()
    trials.fresh_factor = 1 / (0.5 * 0.75)  # the two processes of the search differed by chance
    found = tune(trials)
    assert found.kept == []
    assert found.total is None
    assert all("not repeated in new processes" in each.reason for each in found.dropped[-2:])


def test_search_without_new_processes_has_no_total() -> None:
    trials = two_ways()

    def fail(
        without: Sequence[Change], with_it: Sequence[Change]
    ) -> Generator[tuple[float, float], None, None]:
        raise TrialFailedError("no memory")
        yield

    trials.fresh_pairs = fail  # type: ignore[method-assign]
    found = tune(trials)
    assert len(found.kept) == 2
    assert found.total is None


def test_search_without_gain_keeps_nothing() -> None:
    trials = two_ways()
    trials.factor = lambda _: 1.0
    found = tune(trials)
    assert found.kept == []
    assert found.total is None
    assert any("no certain gain" in each.reason for each in found.dropped)


def test_search_of_slower_change_gives_up_early() -> None:
    facts = ScriptFacts(optimizers=(optimizer(),), threads=1, cpus=1.0)
    trials = FakeTrials(made_up(optimizer_seconds=0.05, facts=facts), lambda changes: 1.5 if changes else 1.0)
    found = tune(trials)
    assert found.kept == []
    assert any(each.reason.startswith("slower: takes 1.5") for each in found.dropped)
    assert sum(FUSED in changes for changes in trials.measured) <= 1 + HOPELESS_ROUNDS


def test_search_of_small_gain_asks_for_more_pairs() -> None:
    facts = ScriptFacts(optimizers=(optimizer(),), threads=1, cpus=1.0)
    trials = FakeTrials(
        made_up(optimizer_seconds=0.05, facts=facts), lambda changes: 0.95 if FUSED in changes else 1.0
    )
    found = tune(trials)
    assert [each.change for each in found.kept] == [FUSED]
    pairs = sum(FUSED in changes for changes in trials.measured) - 1 - len(trials.fresh)
    assert MIN_ROUNDS < pairs <= MAX_ROUNDS
    assert MIN_FRESH <= len(trials.fresh) <= MAX_FRESH


def test_search_drops_change_that_trains_otherwise() -> None:
    trials = two_ways()
    trials.losses = lambda changes: (2.0, 1.6, 1.3, 1.1) if FUSED in changes else LOSSES
    found = tune(trials)
    assert FUSED not in found.changes
    assert any(each.change == FUSED and "losses differ" in each.reason for each in found.dropped)


def test_search_goes_on_after_change_that_fails() -> None:
    trials = two_ways()
    trials.fails = frozenset({FUSED})
    found = tune(trials)
    assert [each.target for each in found.changes] == [LOADER]
    assert any(each.reason == "failed: the script raised RuntimeError: no" for each in found.dropped)


def test_search_of_script_that_fails_raises() -> None:
    trials = two_ways()
    trials.run = lambda changes: (_ for _ in ()).throw(TrialFailedError("it raised"))  # type: ignore[method-assign]
    with pytest.raises(TrialFailedError, match="it raised"):
        tune(trials)


def test_search_interrupted_returns_what_it_has() -> None:
    whole = two_ways()
    tune(whole)
    cut = two_ways()
    cut.interrupts_after = len(whole.measured) - 2  # within the last pairs
    found = tune(cut)
    assert found.ended == "interrupted"
    assert len(found.kept) == 2
    assert found.total is None
    assert cut.open == 0


@pytest.mark.parametrize("budget", [25.0, 40.0, 60.0, 90.0, 1000.0])
def test_search_begins_nothing_that_ends_too_late(budget: float) -> None:
    """Runs take ten seconds, pairs three, and those with new processes twelve more."""
    trials, now = two_ways(), [0.0]
    run, pairs = trials.run, trials.pairs

    def slow_run(changes: Sequence[Change]) -> Trial:
        now[0] += 10
        return run(changes)

    def slow_pairs(
        without: Sequence[Change], with_it: Sequence[Change]
    ) -> Generator[tuple[float, float], None, None]:
        for number, pair in enumerate(pairs(without, with_it)):
            now[0] += 3 + 12 * (number % PAIRS_PER_PROCESS == 0)
            yield pair

    trials.run, trials.pairs = slow_run, slow_pairs  # type: ignore[method-assign]
    found = TuningSearch(trials, Requested(), lambda: now[0], budget, lambda _: None).tune()
    # The first pair takes five seconds more than a run, and nothing was known of it before.
    assert now[0] <= budget + 5
    assert found.ended == ("time" if budget < 1000 else "")


def test_search_out_of_time_has_what_was_measured() -> None:
    def cut(budget: int) -> Tuning:
        trials = two_ways()
        trials.factor = lambda _: 1.0
        return tune(trials, budget=budget)

    undecided = [
        (found, each)
        for found in map(cut, range(5, 40))
        for each in found.dropped
        if each.reason.startswith("not decided: ")
    ]
    assert all(found.ended == "time" for found, _ in undecided)
    assert {each.beside is None for _, each in undecided} == {True, False}
    assert any(found.best_dropped == each for found, each in undecided)


def test_search_slower_alternative_has_both_first_runs() -> None:
    trials = two_ways()
    trials.factor = lambda changes: 0.5 if FUSED in changes else 0.9 if FOREACH in changes else 1.0
    found = tune(trials, Requested(only=(OPTIMIZER,)))
    (dropped,) = (each for each in found.dropped if each.change == FOREACH)
    assert re.fullmatch(r"slower in a first run: [\d.]+ ms a step; fused=True, [\d.]+ ms", dropped.reason)


def test_search_ends_at_its_time_limit() -> None:
    found = tune(two_ways(), budget=5)
    assert found.ended == "time"
    assert found.kept == []


def test_search_of_random_script_says_losses_unchecked() -> None:
    trials = two_ways()
    count = iter(range(10**6))
    trials.losses = lambda _: tuple(each + next(count) for each in LOSSES)
    found = tune(trials)
    assert found.repeated == "any"
    assert {each.losses.result for each in found.kept} == {"not checked"}


def test_search_tries_precision_only_on_request() -> None:
    facts = ScriptFacts(threads=1, cpus=1.0)
    trials = FakeTrials(made_up(facts=facts), lambda changes: 0.5 if changes else 1.0)
    trials.losses = lambda changes: (2.0, 1.6, 1.3, 1.1) if changes else LOSSES
    assert tune(trials).kept == []
    (kept,) = tune(trials, Requested(matmul_precision="high")).kept
    assert kept.change == change(MATMUL, precision="high")
    assert kept.losses.result == "differ"


# What is proposed.


def targets(trial: Trial, kept: tuple[Change, ...] = ()) -> list[str]:
    return [group.changes[0].target for group in propose(trial, kept, Requested())[0]]


def test_proposal_orders_by_share_of_the_step() -> None:
    facts = ScriptFacts((loader(),), (optimizer(),), threads=1, cpus=1.0)
    assert targets(made_up(data=0.06, optimizer_seconds=0.02, facts=facts)) == [LOADER, OPTIMIZER]
    assert targets(made_up(data=0.01, optimizer_seconds=0.02, facts=facts)) == [OPTIMIZER, LOADER]


def test_proposal_of_one_target_has_no_other() -> None:
    facts = ScriptFacts((loader(),), (optimizer(),), threads=2, cpus=2.0)
    trial = made_up(data=0.06, optimizer_seconds=0.02, facts=facts)
    groups, _ = propose(trial, (), Requested(only=(OPTIMIZER,)))
    assert [group.changes for group in groups] == [(FUSED, FOREACH)]


def test_proposal_without_wait_leaves_the_loader() -> None:
    facts = ScriptFacts((loader(),), threads=1, cpus=1.0)
    groups, skipped = propose(made_up(data=0.001, facts=facts), (), Requested())
    assert groups == []
    assert "DataLoader: the loop waits for it in 1.0% of a step" in skipped


def test_proposal_leaves_iterable_datasets() -> None:
    facts = ScriptFacts((loader(is_iterable=True),), threads=1, cpus=1.0)
    groups, skipped = propose(made_up(data=0.09, facts=facts), (), Requested())
    assert groups == []
    assert any("iterable" in reason for reason in skipped)


def test_proposal_pins_memory_only_with_cuda() -> None:
    for uses_cuda in (False, True):
        facts = ScriptFacts((loader(),), threads=1, cpus=4.0, uses_cuda=uses_cuda)
        groups, _ = propose(made_up(data=0.05, facts=facts), (), Requested())
        names = {name for group in groups for each in group.changes for name, _ in each.values}
        assert ("pin_memory" in names) is uses_cuda


def test_proposal_of_fused_optimizer_is_empty() -> None:
    facts = ScriptFacts(optimizers=(optimizer(fused=True),), threads=1, cpus=1.0)
    groups, skipped = propose(made_up(optimizer_seconds=0.05, facts=facts), (), Requested())
    assert groups == []
    assert "optimizer: it is fused already" in skipped


def test_proposal_of_threads_has_no_count_in_use() -> None:
    facts = ScriptFacts(threads=8, cpus=8.0)
    (group,), _ = propose(made_up(facts=facts), (), Requested())
    assert [dict(each.values)["threads"] for each in group.changes] == [1, 4]
    (group,), _ = propose(made_up(facts=facts), (change(THREADS, threads=4),), Requested())
    assert [dict(each.values)["threads"] for each in group.changes] == [1, 8]


def test_search_never_tries_the_scripts_own_threads() -> None:
    """Also not once another number is kept."""
    one = change(THREADS, threads=1)
    facts = ScriptFacts(threads=2, cpus=2.0)
    trials = FakeTrials(made_up(facts=facts), lambda changes: 0.2 if one in changes else 1.0)
    found = tune(trials)
    assert [each.change for each in found.kept] == [one]
    assert found.dropped == []
    assert all(change(THREADS, threads=2) not in changes for changes in trials.measured)


def test_search_has_the_reason_of_a_failed_verification() -> None:
    class Trials(FakeTrials):
        def fresh_pairs(
            self, without: Sequence[Change], with_it: Sequence[Change]
        ) -> Generator[tuple[float, float], None, None]:
            raise TrialFailedError("the script raised OSError: address in use")
            yield 0.0, 0.0

    facts = ScriptFacts(optimizers=(optimizer(),), threads=1, cpus=1.0)
    unchanged = made_up(optimizer_seconds=0.03, facts=facts)
    found = tune(Trials(unchanged, lambda changes: 0.7 if FUSED in changes else 1.0))
    assert found.kept
    assert (found.total, found.unverified) == (None, "the script raised OSError: address in use")


def test_proposal_begins_with_the_rule_of_the_verdict() -> None:
    facts = ScriptFacts((loader(),), threads=1, cpus=1.0)
    waits = LoaderFacts(cpus=1.0, draw_cpu=0.1, rest_cpus=1.0)
    trial = replace(made_up(data=0.05, facts=facts), loader=waits)
    advice = trial.loader_advice(UNMEASURED_COST)
    assert advice is not None
    (group,), _ = propose(trial, (), Requested(), advice)
    assert dict(group.changes[0].values)["num_workers"] == advice.workers


def test_proposal_after_workers_has_more_of_them() -> None:
    facts = ScriptFacts((loader(),), threads=1, cpus=1.0)
    kept = (change(LOADER, num_workers=4, persistent_workers=True),)
    (group,), _ = propose(made_up(data=0.05, facts=facts), kept, Requested())
    assert [dict(each.values)["num_workers"] for each in group.changes] == [8]


# Losses.


def test_losses_of_reordered_sums_are_close() -> None:
    near = made_up(losses=tuple(each * (1 + 1e-6) for each in LOSSES))
    assert check_losses(made_up(), near, "close", "exact").result == "close"
    assert not check_losses(made_up(), near, "exact", "exact").is_allowed
    far = made_up(losses=tuple(each * 1.01 for each in LOSSES))
    assert not check_losses(made_up(), far, "close", "exact").is_allowed


def test_losses_of_same_batches_may_differ_in_workers() -> None:
    other = made_up(losses=(2.5, 1.0, 1.0, 1.0))
    checked = check_losses(made_up(), other, "batches", "exact")
    assert checked.is_allowed
    assert "random augmentation" in checked.words
    shuffled = replace(other, batches=(4, 3, 2, 1))
    assert not check_losses(made_up(), shuffled, "batches", "exact").is_allowed


def test_losses_too_few_are_not_checked() -> None:
    assert repeats(made_up(losses=(1.0,)), made_up(losses=(1.0,))) == "any"
    assert repeats(made_up(), made_up()) == "exact"
    assert repeats(made_up(), made_up(losses=tuple(each + 1e-6 for each in LOSSES))) == "close"


def test_changes_of_one_target_replace_each_other() -> None:
    assert merged((WORKERS, FUSED), FOREACH) == (WORKERS, FOREACH)
    assert Change.from_dict(WORKERS.to_dict()) == WORKERS


def test_trial_survives_its_document() -> None:
    facts = ScriptFacts(
        (loader(2),), (optimizer(),), (Site("a.py", 9),), 2, Site("a.py", 1), 2.0, True, "high"
    )
    trial = made_up(data=0.01, facts=facts)
    assert msgspec.convert(json.loads(json.dumps(dataclasses.asdict(trial))), Trial) == trial
