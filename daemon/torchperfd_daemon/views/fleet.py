"""The answers of daemons as documents: which have answered, and the stacks of all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torchperfd.v1 import control_pb2
from torchperfd_daemon.stacks import Outcome, RankStacks

Answer = control_pb2.ListRunsResponse | control_pb2.GetStepsResponse | control_pb2.DiagnoseResponse

_MAX_NAMES: Final = 4


def fleet_dict(answer: Answer) -> dict[str, Any]:
    """Return which daemons have answered and which not, for a document; empty without a fleet request."""
    if not answer.nodes:
        return {}
    return {
        "nodes": [
            {
                "node": node.node,
                "address": node.address or None,
                "version": node.version,
                "revision": node.revision or None,
                "connected_ranks": node.ranks,
            }
            for node in answer.nodes
        ],
        "unreachable": [{"address": peer.address, "reason": peer.reason} for peer in answer.unreachable],
    }


def builds_text(nodes: Iterable[control_pb2.FleetNode]) -> str:
    """Return which nodes run which build of torchperfd, in a line; empty if all run the same one."""
    builds: dict[str, list[str]] = {}
    for node in nodes:
        name = f"{node.version} ({node.revision})" if node.revision else node.version
        builds.setdefault(name, []).append(node.node)
    if len(builds) < 2:
        return ""
    by_size = sorted(builds.items(), key=lambda build: -len(build[1]))
    return "the nodes run different builds of torchperfd: " + "; ".join(
        f"{name} on {_some(names)}" for name, names in by_size
    )


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_NAMES else f"{len(names)} nodes"


_MAX_RANKS: Final = 100_000


def each_once(ranks: Sequence[RankStacks]) -> list[RankStacks]:
    """Return one answer of each rank, in order: a rank that has moved is reported as gone by its old node."""
    once: dict[int, RankStacks] = {}
    for rank in sorted(ranks, key=lambda rank: rank.outcome is Outcome.GONE):
        once.setdefault(rank.rank, rank)
    return [once[number] for number in sorted(once)]


def absent_ranks(ranks: Sequence[RankStacks], wanted: Sequence[int]) -> list[int]:
    """Return the ranks asked for, by default all of the run, that are not in the answers."""
    world = min(max(rank.world_size for rank in ranks), _MAX_RANKS)
    found = {rank.rank for rank in ranks}
    return [rank for rank in wanted or range(world) if rank not in found]
