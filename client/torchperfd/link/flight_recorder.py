"""How far this process's collectives are, as torch's own Flight Recorder has it.

torch numbers the collectives of every process group and keeps the newest of them in memory: with NCCL, and in
torch 2.13 with gloo, too, unless ``TORCH_FR_BUFFER_SIZE`` is 0. It is asked only while a rank is stalled:
writing the record out takes milliseconds, and the interpreter with it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_MAX_SIZES: Final = 4


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far this rank is in one process group; collectives are counted from 1.

    Attributes:
        name: The same on all ranks of the group.
        description: Such as ``default_pg``.
        begun: The newest that this rank has come to.
        number: The earliest that is not over; 0 when all are.
        call: Of that one, such as ``all_reduce``.
        sizes: Of its inputs, such as ``4x4, 10``.
    """

    name: str
    description: str
    begun: int
    number: int
    call: str
    sizes: str


def read(record: bytes) -> list[GroupProgress]:
    """Return the progress of each group, in the order in which the groups were first used.

    Args:
        record: JSON, as torch writes it.

    Raises:
        ValueError: It is in no form that is known.
    """
    try:
        document = json.loads(record)
        status = document.get("pg_status", {})
        entries: dict[str, list[Mapping[str, Any]]] = {}
        for entry in document.get("entries", ()):
            if not entry["is_p2p"]:
                entries.setdefault(str(entry["pg_id"]), []).append(entry)
        return [_group(of, status.get(group, {})) for group, of in entries.items()]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no record of collectives: {error!r}") from error


def _group(entries: Iterable[Mapping[str, Any]], status: Mapping[str, Any]) -> GroupProgress:
    ordered = sorted(entries, key=lambda entry: int(entry["collective_seq_id"]))
    name, description = ordered[0]["process_group"]
    waiting = next(
        (entry for entry in ordered if not entry["retired"] and entry["state"] != "completed"), None
    )
    sizes = waiting["input_sizes"] if waiting is not None else []
    return GroupProgress(
        str(name),
        str(description),
        max(int(ordered[-1]["collective_seq_id"]), int(status.get("last_enqueued_collective", 0))),
        int(waiting["collective_seq_id"]) if waiting is not None else 0,
        str(waiting["profiling_name"]).rpartition(":")[2] if waiting is not None else "",
        ", ".join("x".join(map(str, each)) or "1" for each in sizes[:_MAX_SIZES])
        + (", …" if len(sizes) > _MAX_SIZES else ""),
    )
