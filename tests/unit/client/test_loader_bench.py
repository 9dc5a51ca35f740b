"""One comparison of a loader's settings, with a measurer that follows a formula."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.golden import check_golden

from torchperfd.document.terminal import Page, render
from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_cli.bench.loader_bench import LoaderBench, UnusableLoaderError, bench_loader, loader_document
from torchperfd_cli.bench.loader_process import (
    LoaderDescription,
    LoaderSetting,
    Outcome,
    RestOfStep,
    Speed,
    Unusable,
)
from torchperfd_cli.bench.search import SearchSpace

Measure = Callable[[LoaderSetting], Outcome]


class Formula:
    """A measurer of a loader of which everything is known."""

    def __init__(self, measure: Measure, rest: float | None = None, *, has_step: bool = False) -> None:
        self._measure = measure
        self._rest = rest
        self._has_step = has_step

    def facts(self) -> LoaderDescription:
        return LoaderDescription(LoaderSetting(0, 32), True, self._has_step, 2.0, False)

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        return self._measure(setting)

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        return None if self._rest is None else RestOfStep(self._rest, 0.029)


FACTS = LoaderFacts(cpus=4.0, draw_cpu=1.0, rest_cpus=1.0, batch_tensors=2, batch_bytes=393_216)


def used(setting: LoaderSetting) -> LoaderFacts | None:
    return None if setting.workers else FACTS


def batch(setting: LoaderSetting) -> float:
    return 0.064 / min(1 + setting.workers, 3) + 0.001


def alone(setting: LoaderSetting) -> Outcome:
    if setting.workers == 4:
        return Unusable("no answer within 1 min 6 s")
    took = batch(setting)
    start = 0.05 + 0.01 * setting.workers
    return Speed(32 / took, 0.021, took, took, start, 100, 393_216, used(setting))


def with_step(setting: LoaderSetting) -> Outcome:
    took = max(0.030, batch(setting))
    return Speed(32 / took, 0.021, took, max(0.002, took - 0.029), 0.05, 100, 393_216, used(setting))


def run(measurer: Formula) -> LoaderBench:
    found = bench_loader("train:make_loader", measurer, lambda _: SearchSpace(4), lambda *_: None)
    found.took_seconds = 12.3
    return found


def test_table_of_a_loader_by_itself() -> None:
    check_golden("bench-dataloader.txt", f"{run(Formula(alone))}\n")


def test_table_of_a_loader_with_a_step() -> None:
    check_golden("bench-dataloader-step.txt", f"{run(Formula(with_step, 0.028, has_step=True))}\n")


@pytest.mark.parametrize("bench", [Formula(alone), Formula(with_step, 0.028, has_step=True)])
def test_table_fits_a_terminal_with_notes_below(bench: Formula) -> None:
    found = run(bench)
    text = render(loader_document(found), Page(80))
    assert max(map(len, text.splitlines())) <= 80
    assert Counter(text.split()) == Counter(str(found).split())
    below = [line for line in text.splitlines() if line.startswith("    the loader's own")]
    assert len(below) == 1
    assert render(loader_document(found), Page(120)) == str(found)


def test_table_of_every_setting_fits_80_columns() -> None:
    found = run(Formula(with_step, 0.028, has_step=True))
    varied = {
        replace(setting, batch_size=size, start_method=method, pin_memory=True, threads=16): outcome
        for setting, outcome in found.outcomes.items()
        for size in (32, 4096)
        for method in ("fork", "forkserver")
    }
    found.outcomes.update(varied)
    text = render(loader_document(found), Page(80))
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if line == "batch 4096"]
    assert Counter(text.split())["forkserver"] > 0
    assert "forkserver" in render(loader_document(found), Page(120))


def test_loader_beside_the_steps_of_a_running_job() -> None:
    text = str(run(Formula(alone, 0.010)))
    assert "a step takes 10 ms without input, the loader makes a batch in 22.3 ms" in text
    assert "55% of a step is waiting for input" in text


def test_document_has_every_setting_and_the_recommended() -> None:
    document = run(Formula(alone)).to_dict()
    assert document["schema"] == "torchperfd.bench_dataloader/1"
    assert document["recommended"]["workers"] == 2
    assert document["gain_ratio"] == pytest.approx(batch(LoaderSetting(0)) / batch(LoaderSetting(2)))
    by_workers = {each["workers"]: each for each in document["settings"]}
    assert by_workers[4]["speed"] is None
    assert by_workers[4]["unusable"] == "no answer within 1 min 6 s"
    assert by_workers[2]["speed"]["batches"] >= 100
    assert by_workers[0]["speed"]["loader"]["draw_cpu"] == 1.0
    assert document["predicted_batch_seconds"] == pytest.approx(batch(LoaderSetting(0)) / 2, rel=0.1)
    assert document["advice"]["rule"] == "loader-workers"


def test_document_has_the_ceiling_measured_and_predicted() -> None:
    document = run(Formula(with_step, 0.028, has_step=True)).to_dict()
    assert (document["rest_seconds"], document["predicted_rest_seconds"]) == (0.028, 0.029)


def test_loader_that_gives_nothing_without_workers_is_an_error() -> None:
    with pytest.raises(UnusableLoaderError, match=r"train:make_loader gave no batch: ValueError: no file"):
        run(Formula(lambda _: Unusable("ValueError: no file")))


def test_ctrl_c_keeps_what_was_measured() -> None:
    asked: list[LoaderSetting] = []

    def measure(setting: LoaderSetting) -> Outcome:
        asked.append(setting)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return alone(setting)

    found = run(Formula(measure))
    assert not found.is_complete
    assert list(found.outcomes) == asked[:2]
    assert found.recommended == LoaderSetting(1, 32, 2)
    assert str(found).endswith("interrupted: not all settings were measured")


def spread_out(setting: LoaderSetting) -> Outcome:
    outcome = alone(setting)
    return replace(outcome, spread=3.0) if isinstance(outcome, Speed) else outcome


def test_bench_gain_within_the_spread_recommends_nothing() -> None:
    found = run(Formula(spread_out))
    assert not found.is_certain
    text = str(found)
    assert "recommended  nothing: " in text
    assert "measurements spread by 300%" in text
    document = found.to_dict()
    assert (document["recommended"], document["recommended_code"]) == (None, None)
    assert document["fastest"]["workers"] > 0


def test_bench_prediction_off_by_more_than_twice_is_hidden() -> None:
    def crowded(setting: LoaderSetting) -> Outcome:
        outcome = alone(setting)
        if setting.workers and isinstance(outcome, Speed):
            return replace(
                outcome, batch_seconds=outcome.batch_seconds / 4, wait_seconds=0.001, samples_per_second=9e5
            )
        return outcome

    found = run(Formula(crowded))
    assert found.predicted_seconds(found.recommended) is not None
    assert found.credible_prediction is None
    assert "predicted" not in str(found)
    assert found.to_dict()["predicted_batch_seconds"] is None
