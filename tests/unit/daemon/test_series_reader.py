"""What is asked of a store of series, how often, and when."""

from collections.abc import Sequence

import pytest

from torchperfd_daemon.errors import DaemonUnreachableError
from torchperfd_daemon.fleet.series_reader import SeriesReader
from torchperfd_daemon.fleet.series_store import SeriesStore, StoreSettings, Vector

NODE = {"run": "far", "instance": "n1:9407", "node": "n1", "job_name": "nightly", "local_rank": "0"}


class Stored(SeriesStore):
    """A store that has some ranks of a run on one node.

    Attributes:
        asked: The queries, in their order.
        ranks: How many make steps.
        world: How many there are.
        is_down: Whether it does not answer.
    """

    def __init__(self) -> None:
        super().__init__(StoreSettings("http://127.0.0.1:9"))
        self.asked: list[str] = []
        self.ranks, self.world, self.is_down = 2, 2, False

    def query_all(self, expressions: Sequence[str]) -> list[Vector]:
        return [*map(self.query, expressions)]

    def query(self, expression: str) -> Vector:
        if self.is_down:
            raise DaemonUnreachableError("no answer", "try again")
        self.asked.append(expression)
        ranks = [{"run": "far", "instance": "n1:9407", "rank": str(rank)} for rank in range(self.ranks)]
        if expression.startswith("count by (cluster"):
            return Vector([(NODE, float(self.world))])
        if "rank_info{local_rank" in expression:
            return Vector([(NODE, 1.0)])
        if "own_work_seconds{" in expression:
            return Vector([(rank, 0.08) for rank in ranks])
        if "world_size{" in expression:
            return Vector([(ranks[0], float(self.world))])
        if expression.startswith("max by (run) (torchperfd_train_last_step"):
            return Vector([] if 'rank=~".*0"' in expression else [({"run": "far"}, 1e9)])
        return Vector()

    def counts(self, beginning: str) -> int:
        """Return how many queries began so."""
        return sum(each.startswith(beginning) for each in self.asked)


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.mark.parametrize(("ranks", "counted"), [(2, 0), (1, 1)])
def test_ranks_are_counted_apart_only_if_some_make_no_steps(stored: Stored, ranks: int, counted: int) -> None:
    stored.ranks = ranks
    [run] = SeriesReader(stored).read("", "").runs.values()
    [node] = run.nodes.values()
    assert (run.world_size, node.node, node.ranks, run.missing) == (2, "n1", 2, 0)
    assert stored.counts("count by (cluster") == counted


def test_run_without_a_step_of_some_ranks_asks_all_for_it(stored: Stored) -> None:
    [run] = SeriesReader(stored).read("", "", with_status=True).runs.values()
    assert [rank.last_step_unix_seconds for rank in run.ranks.values()] == [1e9, 1e9]
    assert stored.counts("max by (run) (torchperfd_train_last_step") == 2


def test_begun_reading_is_the_next_answer(stored: Stored) -> None:
    reader = SeriesReader(stored)
    reader.begin()
    series = reader.read("", "", with_status=True)
    assert series is reader.read("", ""), "what has more serves for less"
    reader.begin()
    assert series is reader.read("", "", with_status=True), "something was read before"
    assert stored.counts("torchperfd_train_own_work_seconds") == 1


def test_begun_reading_that_fails_fails_the_next_question_only(stored: Stored) -> None:
    reader = SeriesReader(stored)
    stored.is_down = True
    reader.begin()
    with pytest.raises(DaemonUnreachableError):
        reader.read("", "", with_status=True)
    stored.is_down = False
    assert list(reader.read("", "").runs) == ["far"]
