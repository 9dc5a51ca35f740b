"""Series of a rank: the cap on them, and the table of fields from which they follow."""

from array import array
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.support.node import ROOT

from torchperfd.model.fields import FIELDS, Field
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.totals import CudaMemory as ClientCudaMemory
from torchperfd.report.rank import rank_document
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.page import ESSENTIAL_FAMILIES, MetricsPage, SeriesCap, by_age, own_metrics
from torchperfd_daemon.metrics.training import TrainingMetrics
from torchperfd_daemon.store.model import RankIdentity, StepColumns
from torchperfd_daemon.store.store import Rank, Store

Series = dict[tuple[str, str], int]


class Crowd:
    """A store with ranks that came one after the other, and its page."""

    def __init__(self, most: int, *, selects: bool = False) -> None:
        self.now = 0.0
        self.store = Store(grace_seconds=60, clock=lambda: self.now)
        self.cap = SeriesCap(most, lambda: by_age(self.store))
        training = TrainingMetrics(self.store, cap=self.cap if selects else None)
        own = partial(own_metrics, self.store)
        self.page = MetricsPage([training.families, own], self.cap)

    def join(self, run: str, rank: int, uid: int = 0) -> Rank:
        """Let a rank come, a second after the one before, and make one step."""
        self.now += 1
        made = self.store.join(RankIdentity(run, rank), uid)
        self.store.add_steps(made, StepColumns(array("q", [1]), array("q", [1]), {}))
        return made

    def shown(self) -> tuple[Series, float]:
        """Return how many series each rank and run has on the page, and how many were left out so far."""
        found: Series = {}
        overflow = -1.0
        for family in parse_text(self.page.render("")[0].decode()):
            for sample in family.samples:
                if family.name == "torchperfd_label_overflow":
                    overflow = sample.value
                elif "run" in sample.labels:
                    key = (sample.labels["run"], sample.labels.get("rank", ""))
                    found[key] = found.get(key, 0) + 1
        return found, overflow


def sizes() -> tuple[int, int, int]:
    """Return how many series the node, a run and a rank have on an uncapped page."""
    crowd = Crowd(10_000)
    crowd.join("a", 0)
    found, overflow = crowd.shown()
    assert overflow == 0
    total = sum(len(metric.samples) for metric in crowd.page.collect()) - 1
    return total - sum(found.values()), found["a", ""], found["a", "0"]


NODE, RUN, RANK = sizes()


def test_below_the_cap_everybody_is_shown() -> None:
    crowd = Crowd(NODE + RUN + 3 * RANK)
    for rank in range(3):
        crowd.join("a", rank)
    assert crowd.shown() == ({("a", ""): RUN, ("a", "0"): RANK, ("a", "1"): RANK, ("a", "2"): RANK}, 0)


def test_past_the_cap_the_newest_is_left_out_whole_and_counted() -> None:
    crowd = Crowd(NODE + RUN + 3 * RANK - 1)
    for rank in (7, 1, 3):
        crowd.join("a", rank)
    expected = {("a", ""): RUN, ("a", "7"): RANK, ("a", "1"): RANK}
    assert crowd.shown() == (expected, RANK)
    assert crowd.shown() == (expected, 2 * RANK), "once per page"


def test_one_that_was_shown_goes_on_being_shown_when_others_come() -> None:
    crowd = Crowd(NODE + RUN + 2 * RANK)
    crowd.join("z", 1)
    crowd.join("z", 0)
    before, _ = crowd.shown()
    for number in range(50):
        crowd.join(f"a{number}", 0)
    assert crowd.shown() == (before, 50 * (RUN + RANK))


def test_a_place_that_becomes_free_is_taken_by_the_next_oldest() -> None:
    crowd = Crowd(NODE + RUN + RANK)
    first = crowd.join("a", 0)
    crowd.join("b", 0)
    crowd.join("c", 0)
    assert set(crowd.shown()[0]) == {("a", ""), ("a", "0")}
    crowd.store.leave(first)
    crowd.now += 61
    assert set(crowd.shown()[0]) == {("b", ""), ("b", "0")}


def test_the_node_stays_whatever_the_cap() -> None:
    crowd = Crowd(1)
    crowd.join("a", 0)
    found, overflow = crowd.shown()
    assert (found, overflow) == ({}, RUN + RANK)
    names = {family.name for family in parse_text(crowd.page.render("")[0].decode())}
    assert {"torchperfd_build_info", "torchperfd_clients"} <= names


def test_ranks_can_be_looked_at_while_one_leaves() -> None:
    crowd = Crowd(1)
    leaver = crowd.join("a", 0)
    crowd.join("a", 1)
    crowd.join("a", 2)
    seen = crowd.store.ranks()
    assert next(seen) is leaver
    for rank in list(crowd.store.ranks())[:2]:
        crowd.store.leave(rank)
    crowd.now += 61
    crowd.store.forget_departed()
    assert [rank.identity.rank for rank in seen] == [1, 2], "as they were when the look began"
    assert [rank.identity.rank for rank in crowd.store.ranks()] == [2]


def test_cap_with_a_crowded_user_leaves_room_for_others() -> None:
    crowd = Crowd(NODE + 4 * (RUN + RANK))
    for number in range(20):
        crowd.join(f"many{number}", 0, uid=1)
    crowd.join("other", 0, uid=2)
    found, overflow = crowd.shown()
    assert {run for run, _ in found} == {"many0", "many1", "many2", "other"}
    assert overflow > 0


def test_select_passes_over_ranks_that_cannot_fit() -> None:
    crowd = Crowd(NODE + 4 * (RUN + RANK), selects=True)
    for number in range(100):
        crowd.join(f"run{number}", 0)
    chosen = crowd.cap.select(crowd.store)
    assert 4 < len(chosen) < 30
    # What is passed over counts as left out, on each page.
    first, second = crowd.shown()[1], crowd.shown()[1]
    assert second == 2 * first > 96 * 8


def test_cap_bounds_a_family_of_the_node_as_well() -> None:
    class Invented:
        def families(self) -> list[Family]:
            family = Family("invented", "Made up.", "counter", ("where",))
            for number in range(3000):
                family.add(1, f"w{number}")
            return [family]

    store = Store()
    page = MetricsPage([Invented().families], SeriesCap(2000, lambda: by_age(store)))
    assert sum(len(metric.samples) for metric in page.collect()) == 2000 + 1


DOC = (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.metric)
def test_field_is_in_docs_with_its_help(field: Field) -> None:
    words = field.help[0].lower() + field.help[1:].removesuffix(".")
    mark = "" if field.metric in ESSENTIAL_FAMILIES else " (full)"
    assert f"| `{field.series}`{mark} | {words} |" in DOC.splitlines()


def test_fields_are_the_families_of_a_rank_in_order() -> None:
    store = Store()
    store.join(RankIdentity("bert", 0))
    families = [family.name for family in TrainingMetrics(store).families()]
    assert [name for name in families if name in {field.metric for field in FIELDS}] == [
        field.metric for field in FIELDS
    ]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.metric)
def test_field_is_in_the_report_document(field: Field) -> None:
    totals = Totals(cuda=ClientCudaMemory(1, 2, 3), host_memory=HostMemory(1, 2))
    *groups, key = field.report.split(".")
    document: dict[str, Any] = rank_document(0, totals, PhaseNames())
    for group in groups:
        document = document[group]
    assert key in document


def test_field_names_end_in_their_unit() -> None:
    for field in FIELDS:
        if field.unit in ("seconds", "bytes", "ratio"):
            assert field.metric.endswith(f"_{field.unit}"), field
