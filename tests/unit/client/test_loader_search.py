"""The search over a DataLoader's settings, against loaders whose speed is a formula."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_cli.bench.loader_process import LoaderDescription, LoaderSetting, Outcome, Speed, Unusable
from torchperfd_cli.bench.search import LoaderSearch, SearchSpace, search_space

Curve = Callable[[LoaderSetting], float | None]
NO_WORKERS = LoaderSetting(0, 32)


def facts(current: LoaderSetting, **changes: object) -> LoaderDescription:
    known = {"can_batch": True, "has_step": False, "cpus": 4.0, "has_device": False}
    return LoaderDescription(current=current, **(known | changes))  # type: ignore[arg-type]


def speed(samples_per_second: float) -> Speed:
    return Speed(samples_per_second, 0.01, 32 / samples_per_second, 0.0, 0.1, 100, 4096)


def searched(
    curve: Curve, current: LoaderSetting = NO_WORKERS, space: SearchSpace | None = None
) -> tuple[LoaderSearch, list[LoaderSetting]]:
    search = LoaderSearch(facts(current), space or SearchSpace(8))
    asked: list[LoaderSetting] = []
    settings = search.settings()
    setting = next(settings, None)
    while setting is not None:
        asked.append(setting)
        assert len(asked) < 200
        given = curve(setting)
        outcome: Outcome = Unusable("no batch within 60 s") if given is None else speed(given)
        try:
            setting = settings.send(outcome)
        except StopIteration:
            setting = None
    return search, asked


def test_workers_rise_to_the_cpus_then_fall() -> None:
    def curve(setting: LoaderSetting) -> float:
        return {0: 100.0}.get(
            setting.workers, 100.0 * min(setting.workers, 3) - 10 * max(0, setting.workers - 3)
        )

    search, asked = searched(curve)
    assert search.recommended() == LoaderSetting(3, 32, 2)
    assert len(set(asked)) <= 8


def test_plateau_recommends_the_fewest_workers() -> None:
    search, _ = searched(lambda setting: 100.0 * min(1 + setting.workers, 3))
    assert search.recommended() == LoaderSetting(2, 32, 2)


def test_cheap_items_stay_without_workers() -> None:
    search, asked = searched(lambda setting: 1000.0 if not setting.workers else 200.0)
    assert search.recommended() == LoaderSetting(0, 32)
    assert max(each.workers for each in asked) <= 4


def test_own_setting_is_kept_where_nothing_is_faster() -> None:
    own = LoaderSetting(4, 32, 2)
    search, _ = searched(lambda setting: 100.0 * min(1 + setting.workers, 5), own)
    assert search.recommended() == own


def test_prefetch_is_raised_only_while_it_pays() -> None:
    def curve(setting: LoaderSetting) -> float:
        return 100.0 * min(1 + setting.workers, 3) * (1.2 if setting.prefetch >= 4 else 1.0)

    search, asked = searched(curve)
    assert search.recommended() == LoaderSetting(2, 32, 4)
    assert {each.prefetch for each in asked} == {0, 2, 4, 8}


def test_batch_sizes_are_tried_only_when_asked_for() -> None:
    def curve(setting: LoaderSetting) -> float:
        return 100.0 * min(1 + setting.workers, 3) * math.sqrt((setting.batch_size or 0) / 32)

    _, asked = searched(curve)
    assert {each.batch_size for each in asked} == {32}
    search, _ = searched(curve, space=SearchSpace(8, batch_sizes=(64, 128)))
    assert search.recommended() == LoaderSetting(2, 128, 2)


def test_pinned_memory_is_tried_only_beside_a_device() -> None:
    space = search_space(facts(LoaderSetting(0, 32), has_device=True))
    search, _ = searched(lambda setting: 100.0 + 50 * setting.pin_memory + setting.workers, space=space)
    recommended = search.recommended()
    assert recommended is not None
    assert recommended.pin_memory
    assert not search_space(facts(LoaderSetting(0, 32))).pin_memory


def test_workers_that_deadlock_are_not_raised_further() -> None:
    search, asked = searched(lambda setting: None if setting.workers else 100.0)
    assert search.recommended() == LoaderSetting(0, 32)
    assert [each.workers for each in asked if each.workers] == [1]


def test_loader_that_works_only_with_workers_is_still_searched() -> None:
    search, _ = searched(lambda setting: 100.0 * min(setting.workers, 3) if setting.workers else None)
    assert search.recommended() == LoaderSetting(3, 32, 2)


def test_nothing_usable_recommends_nothing() -> None:
    search, _ = searched(lambda _: None)
    assert search.recommended() is None


def test_failed_round_leaves_the_rounds_before_it() -> None:
    seen: dict[LoaderSetting, int] = {}

    def curve(setting: LoaderSetting) -> float | None:
        seen[setting] = seen.get(setting, 0) + 1
        return None if seen[setting] == 2 else 100.0

    search, _ = searched(curve)
    assert search.recommended() == LoaderSetting(0, 32)
    assert all(isinstance(found, Speed) for found in search.outcomes.values())


def test_lucky_measurement_is_not_believed() -> None:
    """One figure of a busy machine is three times too high."""
    seen: list[LoaderSetting] = []

    def curve(setting: LoaderSetting) -> float:
        seen.append(setting)
        true = 100.0 * min(1 + setting.workers, 3)
        return 3 * true if setting.workers == 4 and seen.count(setting) == 1 else true

    search, _ = searched(curve)
    assert search.recommended() == LoaderSetting(2, 32, 2)


@pytest.mark.parametrize(("cpus", "most"), [(1.0, 2), (2.0, 4), (3.5, 7), (64.0, 16)])
def test_search_space_tries_twice_the_cpus(cpus: float, most: int) -> None:
    assert search_space(facts(LoaderSetting(0), cpus=cpus)).most_workers == most


@given(
    make=st.floats(0.1, 100),
    receive=st.floats(0.01, 10),
    send=st.floats(0.01, 10),
    cpus=st.integers(1, 12),
    contention=st.floats(0, 0.2),
    own=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_recommended_is_near_the_best_for_few_measurements(
    make: float, receive: float, send: float, cpus: int, contention: float, own: int, seed: int
) -> None:
    """A loader that follows the usual model, measured with 1 % of noise: within 5 % of the best."""
    chance = random.Random(seed)

    def true(setting: LoaderSetting) -> float:
        if not setting.workers:
            return 1000 / make
        busy = min(setting.workers, cpus)
        crowd = 1 + contention * max(0, setting.workers - cpus)
        return 1000 / (max(receive, (make + send) / busy) * crowd)

    current = LoaderSetting(own, 32, 2 if own else 0)
    search, asked = searched(
        lambda setting: true(setting) * chance.gauss(1, 0.01), current, SearchSpace(most_workers=12)
    )
    recommended = search.recommended()
    assert recommended is not None
    best = max(true(LoaderSetting(workers, 32, 2 if workers else 0)) for workers in range(13))
    assert true(recommended) >= 0.95 * best
    assert len(set(asked)) <= 13
