"""Whether two functions differ by more than noise, and how that is put into words."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.support.golden import check_golden

from torchperfd.document.terminal import Page, render
from torchperfd_cli.bench import functions
from torchperfd_cli.bench.functions import (
    FunctionsBench,
    Row,
    bench_functions,
    compare_rounds,
    functions_document,
    measurement_of,
)


def bench() -> FunctionsBench:
    rounds = {
        (0, 0): [0.100, 0.110, 0.090, 0.100],
        (1, 0): [0.025, 0.027, 0.023, 0.025],
        (2, 0): [0.101, 0.108, 0.091, 0.100],
        (0, 1): [0.200, 0.210, 0.190, 0.200],
        (1, 1): [0.300, 0.320, 0.280, 0.300],
        (2, 1): [0.201, 0.209, 0.191, 0.200],
    }
    rows = [Row({"batch_size": 32}, 1), Row({"batch_size": 64}, 4)]
    return FunctionsBench(["rasterio", "skimage", "again"], rows, rounds, "[- a table -]\n")


def test_rounds_that_agree_give_a_narrow_interval() -> None:
    found = compare_rounds([1.0, 1.1, 0.9], [0.5, 0.55, 0.45])
    assert found.ratio == pytest.approx(0.5)
    assert found.low == pytest.approx(found.high)
    assert found.differs


def test_interval_is_the_paired_t_of_the_ratios_logarithms() -> None:
    found = compare_rounds([1.0, 1.0, 1.0], [1.0, math.e**0.1, math.e**0.2])
    error = 4.303 * 0.1 / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(0.1))
    assert found.low == pytest.approx(math.exp(0.1 - error))
    assert found.high == pytest.approx(math.exp(0.1 + error))
    assert not found.differs


def test_equal_functions_differ_in_one_of_twenty_comparisons() -> None:
    chance = random.Random(3)
    named = sum(
        compare_rounds(
            [chance.gauss(1, 0.05) for _ in range(5)], [chance.gauss(1, 0.05) for _ in range(5)]
        ).differs
        for _ in range(2000)
    )
    assert 0.035 < named / 2000 < 0.065


def test_slower_names_only_what_is_beyond_the_share_and_noise() -> None:
    assert bench().slower_than(0.05) == ["skimage takes 1.50 times as long as rasterio"]
    assert bench().slower_than(0.6) == []


def test_text_is_the_table_with_what_differs() -> None:
    check_golden("bench-compare.txt", render(functions_document(bench())) + "\n")


def test_text_folds_all_but_the_table_of_torch() -> None:
    names = [f"image_libraries_of_everyone.resize:{name}" for name in ("rasterio", "skimage", "again")]
    found = replace(bench(), names=names, table="[- a table of torch, of any width -]" * 4)
    table, *lines = render(functions_document(found), Page(80)).splitlines()
    assert table == found.table
    assert max(map(len, lines)) <= 80
    assert [table, *lines] != render(functions_document(found)).splitlines()
    assert render(functions_document(found), Page(80)).split() == render(functions_document(found)).split()


def test_document_has_each_round_and_the_interval() -> None:
    document = bench().to_dict()
    assert document["schema"] == "torchperfd.bench_compare/1"
    first, second = document["rows"]
    assert first["parameters"] == {"batch_size": 32}
    assert second["threads"] == 4
    assert [each["name"] for each in first["functions"]] == ["rasterio", "skimage", "again"]
    assert first["functions"][0]["beside_first"] is None
    assert first["functions"][1]["beside_first"]["ratio"] == pytest.approx(0.25, rel=0.02)
    assert first["functions"][1]["rounds_seconds"] == [0.025, 0.027, 0.023, 0.025]


class FakeProcess:
    """A process in which functions take a second and two, but for what is particular to the process."""

    particular = (1.06, 0.95, 1.0, 1.04, 0.97)
    asked: list[list[str]]
    open = 0

    def __init__(self, module: str, arguments: list[str]) -> None:
        self._factor = self.particular[len(self.asked)]
        self.asked.append([])
        FakeProcess.open += 1

    def start(self, timeout: float, problem: str) -> dict[str, Any]:
        return {"threads": 2}

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if "table" in request:
            return {"table": f"{len(request['table'])} measurements"}
        if "warm_up" in request:
            self.asked[-1].append(f"warm up {request['function']}")
            return {}
        self.asked[-1].append(request["name"])
        took = 2 * self._factor if request["function"] else 1.0
        return {"seconds": took, "times": [took], "runs": 1}

    def close(self) -> None:
        FakeProcess.open -= 1


def test_each_round_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is particular to a process is noise, so that a measurement in another one is in the interval."""
    monkeypatch.setattr(functions, "WorkerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "asked", [], raising=False)
    found = bench_functions(
        ["a:first", "a:other"],
        setup="",
        parameters={},
        threads=[],
        seconds=0.1,
        rounds=5,
        timeout=1.0,
        progress=lambda _: None,
    )
    warm_up = ["warm up 0", "warm up 1"]
    rounds = [[*warm_up, "first", "other"], [*warm_up, "other", "first"]]
    assert FakeProcess.asked == [*rounds, *rounds, rounds[0]]
    assert FakeProcess.open == 0
    assert found.table == "10 measurements"
    assert found.rows == [Row({}, 2)]
    compared = found.compare(1, 0)
    assert compared.low < 2.0 < compared.high
    assert compared.low < 2.0 * 1.04 < compared.high


def test_measurement_of_another_process_is_torchs_own() -> None:
    request = {"label": "time of one call", "row": "size=2", "name": "loops", "threads": 2}
    found = measurement_of({**request, "times": [0.2, 0.6, 0.4], "runs": 2})
    assert found.median == pytest.approx(0.2)
    assert (found.num_threads, found.task_spec.description) == (2, "loops")
