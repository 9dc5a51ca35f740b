"""What commands and HTTP show of captures, of the answers of daemons, and of goodput."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from torchperfd.document.blocks import Block, Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import duration
from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures.manifest import Upload
from torchperfd_daemon.goodput.totals import Bucket, RunGoodput, ratio_of
from torchperfd_daemon.stacks.model import Outcome, RankStacks
from torchperfd_daemon.views.model import Answer

if TYPE_CHECKING:
    from torchperfd_daemon.captures.index import Listed, Listing

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


class Captures(Protocol):
    """Captures in a directory, read by this process or through a daemon."""

    @property
    def directory(self) -> Path:
        """The directory."""

    @property
    def uploads(self) -> bool:
        """Whether a daemon uploads them."""

    def has_analysis(self, capture_id: str, /) -> bool:
        """Return whether the daemon has analysed one."""


def listing_dict(catalog: Captures, listing: "Listing") -> dict[str, Any]:
    """Return the document of a listing."""
    uploads = catalog.uploads
    return {
        "schema": "torchperfd.captures/1",
        "directory": str(catalog.directory),
        "total": listing.total,
        "captures": [listed_dict(catalog, listed, uploads=uploads) for listed in listing.captures],
    }


def listed_dict(catalog: Captures, listed: "Listed", *, uploads: bool) -> dict[str, Any]:
    """Return a capture: its manifest, and what the directory has of it.

    Args:
        uploads: Whether a daemon uploads captures.
    """
    return {
        **msgspec.to_builtins(listed.record),
        "pinned": listed.pinned,
        "uploaded": uploaded(listed, uploads=uploads),
        "analysed": catalog.has_analysis(listed.record.capture_id),
        "disk_bytes": listed.bytes,
    }


def uploaded(listed: "Listed", *, uploads: bool) -> str:
    """Return whether a capture is uploaded, or will be if a daemon uploads captures."""
    if listed.upload is Upload.DONE:
        return "yes"
    return "pending" if uploads and listed.upload is Upload.PENDING else "no"


SCHEMA: Final = "torchperfd.goodput/1"

_NAMES: Final = {
    Bucket.START_UP: "start-up",
    Bucket.PRODUCTIVE: "productive steps",
    Bucket.DATA_WAIT: "data wait",
    Bucket.COMMUNICATION_WAIT: "communication wait",
    Bucket.VALIDATION: "validation",
    Bucket.CHECKPOINT: "checkpoint",
    Bucket.STALL: "stall",
    Bucket.RESTART_GAP: "restart gap",
    Bucket.SHUTDOWN: "shutdown",
}


def to_dict(runs: Sequence[RunGoodput]) -> dict[str, Any]:
    """Return the document of schema :data:`SCHEMA`."""
    return {"schema": SCHEMA, "runs": [_run_dict(run) for run in runs]}


def goodput_document(runs: Sequence[RunGoodput], zone: tzinfo | None = None) -> Document:
    """Return a section per run; dates are in the given time zone, by default the local one."""
    return Document([_run_blocks(run, zone) for run in runs])


def _run_dict(run: RunGoodput) -> dict[str, Any]:
    gpu_hours = run.gpu_hours
    lost = None
    if gpu_hours is not None:
        lost = {bucket.value: hours for bucket, hours in gpu_hours.items() if bucket is not Bucket.PRODUCTIVE}
    return {
        "run": run.run,
        "since_unix_seconds": run.since_unix_seconds,
        "until_unix_seconds": run.until_unix_seconds,
        "restarts": run.restarts,
        "goodput_ratio": run.ratio,
        "rank_seconds": run.total_seconds,
        "bucket_seconds": _by_name(run.seconds),
        "lost_gpu_hours": lost,
        "ranks": [
            {
                "rank": rank.rank,
                "running": rank.running,
                "since_unix_seconds": rank.since_unix_seconds,
                "until_unix_seconds": rank.until_unix_seconds,
                "starts": rank.starts,
                "gpus": rank.gpus,
                "goodput_ratio": rank.ratio,
                "bucket_seconds": _by_name(rank.seconds),
            }
            for rank in run.ranks
        ],
    }


def _run_blocks(run: RunGoodput, zone: tzinfo | None) -> list[Block]:
    ranks, restarts = len(run.ranks), run.restarts
    since = datetime.fromtimestamp(run.since_unix_seconds, zone).strftime("%Y-%m-%d %H:%M:%S")
    title = (
        f"{run.run}: goodput {run.ratio:.1%} of {duration(run.total_seconds)} of rank time,"
        f" {ranks} rank{_s(ranks)}, {restarts} restart{_s(restarts)}, since {since}"
    )
    hours = run.gpu_hours
    rows = []
    for bucket, seconds in run.seconds.items():
        share = seconds / run.total_seconds if run.total_seconds else 0.0
        gpu = [f"{hours[bucket]:.2f}"] if hours else []
        rows.append([_NAMES[bucket], duration(seconds), f"{share:.1%}", *gpu])
    heads = ["BUCKET", "TIME", "SHARE", *(["GPU HOURS"] if hours else [])]
    parts = [(str(rank.rank), rank.seconds) for rank in run.ranks] if ranks > 1 else []
    return [Sentences([title]), Table(heads, rows, left=heads[:1], indent=2), *_parts_table("RANK", parts)]


BucketSeconds = Mapping[Bucket, float]
"""Rank-seconds by their use."""


def nodes_to_dict(runs: Mapping[str, Mapping[str, BucketSeconds]]) -> dict[str, Any]:
    """Return the goodput of runs, by node, as a document of schema :data:`SCHEMA` that has no ranks."""
    return {
        "schema": SCHEMA,
        "runs": [
            {
                "run": run,
                "goodput_ratio": ratio_of(whole := _sum(nodes.values())),
                "rank_seconds": sum(whole.values()),
                "bucket_seconds": _by_name(whole),
                "nodes": [
                    {"node": node, "goodput_ratio": ratio_of(each), "bucket_seconds": _by_name(each)}
                    for node, each in sorted(nodes.items())
                ],
            }
            for run, nodes in sorted(runs.items())
        ],
    }


def nodes_document(runs: Mapping[str, Mapping[str, BucketSeconds]]) -> Document:
    """Return a section per run, with its goodput on each of its nodes."""
    return Document([_nodes_blocks(run, nodes) for run, nodes in sorted(runs.items())])


def _nodes_blocks(run: str, nodes: Mapping[str, BucketSeconds]) -> list[Block]:
    whole = _sum(nodes.values())
    total = sum(whole.values())
    goodput = f"goodput {ratio_of(whole):.1%} of {duration(total)} of rank time"
    title = f"{run}: {goodput}, {len(nodes)} node{_s(len(nodes))}"
    rows = [
        [_NAMES[bucket], duration(seconds), f"{seconds / total if total else 0.0:.1%}"]
        for bucket, seconds in whole.items()
    ]
    heads = ["BUCKET", "TIME", "SHARE"]
    parts = sorted(nodes.items(), key=lambda node: (ratio_of(node[1]), node[0]))
    return [Sentences([title]), Table(heads, rows, left=heads[:1], indent=2), *_parts_table("NODE", parts)]


def _sum(parts: Iterable[BucketSeconds]) -> dict[Bucket, float]:
    known = list(parts)
    return {bucket: sum(each[bucket] for each in known) for bucket in Bucket}


def _parts_table(head: str, parts: Sequence[tuple[str, BucketSeconds]]) -> list[Block]:
    """Return the table of a run's ranks or nodes; none without any."""
    heads = [head, "TIME", "GOODPUT", "MOST LOST TO"]
    rows = [
        [name, duration(sum(seconds.values())), f"{ratio_of(seconds):.1%}", _worst(seconds)]
        for name, seconds in parts
    ]
    return [Table(heads, rows, left=(heads[0], heads[-1]), indent=2)] if rows else []


def _worst(spent: BucketSeconds) -> str:
    losses = {bucket: seconds for bucket, seconds in spent.items() if bucket is not Bucket.PRODUCTIVE}
    worst = max(losses, key=losses.__getitem__)
    return f"{_NAMES[worst]} ({duration(losses[worst])})" if losses[worst] else "-"


def _by_name(seconds: Mapping[Bucket, float]) -> dict[str, float]:
    return {bucket.value: value for bucket, value in seconds.items()}


def _s(count: int) -> str:
    return "" if count == 1 else "s"
