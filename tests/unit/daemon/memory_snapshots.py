"""Made-up snapshots of torch's CUDA allocator, in the shape that ``_dump_snapshot`` writes."""

import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20

LINEAR = {
    "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py",
    "line": 125,
    "name": "forward",
}
MODEL = {"filename": "/home/ann/bert/model.py", "line": 42, "name": "forward"}
TRAIN = {"filename": "/home/ann/bert/train.py", "line": 17, "name": "main"}
ADAM = {
    "filename": "/env/lib/python3.11/site-packages/torch/optim/adam.py",
    "line": 180,
    "name": "_init_group",
}
STEP = {"filename": "/home/ann/bert/train.py", "line": 23, "name": "main"}
KERNEL = {"filename": "/pytorch/aten/src/ATen/native/Linear.cpp", "line": 0, "name": "at::native::linear"}

ACTIVATIONS = [KERNEL, LINEAR, MODEL, TRAIN]
OPTIMIZER = [ADAM, STEP]


def block(size: int, state: str = "active_allocated", frames: Any = (), requested: int | None = None) -> Any:
    """Return a block; sizes in bytes."""
    return {
        "address": 0x7F0000000000,
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": list(frames),
    }


def segment(*blocks: Any, address: int = 0x7F0000000000, **fields: Any) -> Any:
    """Return a segment of blocks, one after the other; ``fields`` replace or add some of its own."""
    following = address
    for each in blocks:
        each["address"] = following
        following += each["size"]
    size = sum(each["size"] for each in blocks)
    used = [each for each in blocks if each["state"] != "inactive"]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": sum(each["size"] for each in used if each["state"] == "active_allocated"),
        "active_size": sum(each["size"] for each in used),
        "requested_size": sum(each["requested_size"] for each in used),
        "stream": 0,
        "segment_type": "small" if size <= 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
        **fields,
    }


def fragmented() -> Any:
    """Return a snapshot of 200 MiB after a failed allocation of 50 MiB, with 80 MiB free in pieces of 40."""
    return {
        "segments": [
            segment(
                block(MIB, frames=OPTIMIZER, requested=MIB - 1024),
                block(MIB // 2, "active_awaiting_free", OPTIMIZER),
                block(MIB // 2, "inactive"),
            ),
            segment(
                block(60 * MIB, frames=ACTIVATIONS), block(39 * MIB + MIB // 2, "inactive"), address=1 << 40
            ),
            segment(
                block(58 * MIB + MIB // 2, frames=ACTIVATIONS), block(40 * MIB, "inactive"), address=1 << 41
            ),
        ],
        "device_traces": [
            [
                {
                    "action": "alloc",
                    "addr": 1 << 40,
                    "size": 60 * MIB,
                    "stream": 0,
                    "time_us": 1,
                    "frames": ACTIVATIONS,
                },
                {
                    "action": "oom",
                    "device_free": 0,
                    "size": MIB,
                    "stream": 0,
                    "time_us": 2,
                    "frames": OPTIMIZER,
                },
                {
                    "action": "oom",
                    "device_free": 3 * MIB,
                    "size": 50 * MIB,
                    "stream": 0,
                    "time_us": 1_767_225_600_000_000,
                    "frames": ACTIVATIONS,
                    "pool_id": (0, 0),
                },
            ]
        ],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.8,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "roundup_power2_divisions": {"1": 0, "2": 4},
        },
        "external_annotations": [],
    }


def write(path: Path, snapshot: object, protocol: int = 4) -> Path:
    """Write a snapshot and return its path."""
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return path


def event(action: str, address: int, size: int, frames: Any = (), time_us: int = 1) -> Any:
    """Return an event of the recorded history; sizes in bytes."""
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": list(frames),
    }


def frames(line: int, *names: str) -> list[Any]:
    """Return a stack of C++ functions over a line of the script; line 0 for none."""
    called = [{"filename": "??", "line": 0, "name": name} for name in names]
    return called + ([{**MODEL, "line": line}] if line else [])
