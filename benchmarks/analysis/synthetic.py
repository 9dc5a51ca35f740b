"""Traces such as Kineto exports of a training on a GPU, of any length, without a GPU.

Every step has forward and backward operators on two host threads, their launches, compute kernels on
one stream, collectives on a second, copies on a third, and the arguments that Kineto writes for each.
Four of seven events are on the host, three on the device, each some 380 bytes long.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

_KERNELS: Final = tuple(
    f"void at::native::vectorized_elementwise_kernel<{width}, at::native::{functor}<float>, "
    f"std::array<char*, 3ul> >(int, at::native::{functor}<float>, std::array<char*, 3ul>)"
    for width in (2, 4)
    for functor in ("CUDAFunctor_add", "MulFunctor", "GeluCUDAKernelImpl", "LayerNormForward", "Dropout")
) + tuple(
    f"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{m}x{n}x64_warpgroupsize1x1x1_execute_segment_k_off"
    for m in (64, 128)
    for n in (64, 128, 256)
)
_OPERATORS: Final = tuple(
    f"aten::{name}" for name in ("linear", "addmm", "mul", "add_", "gelu", "native_dropout")
)
_OPERATORS_A_STEP: Final = 250
_ORIGIN_US: Final = 4_423_128_490_356
_HOST, _BACKWARD, _COMPUTE, _COMM, _COPY = 4242, 4300, 7, 20, 24


def write(path: Path, events: int, rank: int = 0) -> None:
    """Write a trace of about ``events`` events to ``path``.

    Traces of several ranks differ in when the rank arrives at collectives, which end at the same time.
    """
    with path.open("w") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "Example GPU"}],\n'
            f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 2}},\n'
            '  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n'
        )
        _write_events(file, events, random.Random(rank))
        file.write(f'\n  ],\n  "traceName": "{path.name}"\n}}\n')


def _write_events(file: IO[str], events: int, lateness: random.Random) -> None:
    separator = "  "
    for number, event in enumerate(_events(random.Random(7), lateness)):
        if number >= events:
            return
        file.write(separator + _as_kineto_does(event))
        separator = ",\n  "


def _as_kineto_does(event: dict[str, Any]) -> str:
    """Return an event's text, a line for what it is, one for where and when, and its arguments below."""
    fields = [f'"{key}": {json.dumps(value)}' for key, value in event.items() if key != "args"]
    text = ", ".join(fields[:3]) + ",\n    " + ", ".join(fields[3:])
    if "args" in event:
        args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
        text += f',\n    "args": {{\n      {args}\n    }}'
    return f"{{\n    {text}\n  }}"


def _events(chance: random.Random, lateness: random.Random) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "name": "process_name",
        "ts": _ORIGIN_US,
        "pid": _HOST,
        "tid": 0,
        "args": {"name": "python"},
    }
    host_ns, free_ns, identifier, step = 0, dict.fromkeys((_COMPUTE, _COMM, _COPY), 0), 1, 0
    while True:
        step += 1
        began = host_ns
        for call in range(_OPERATORS_A_STEP):
            thread = _HOST if call < _OPERATORS_A_STEP // 3 else _BACKWARD
            took = chance.randrange(8_000, 40_000)
            yield from _call(identifier, thread, host_ns, took, free_ns, chance, lateness)
            identifier += 2
            host_ns += took + chance.randrange(500, 4_000)
        yield _complete("user_annotation", f"ProfilerStep#{step}", _HOST, _HOST, began, host_ns - began, {})


def _call(
    identifier: int,
    thread: int,
    start: int,
    took: int,
    free_ns: dict[int, int],
    chance: random.Random,
    lateness: random.Random,
) -> Iterator[dict[str, Any]]:
    """Yield an operator in an operator, its launch, and what it launched."""
    size = 64 << chance.randrange(5)
    dims = {"Input Dims": [[32, size], [size, size], []], "Input type": ["float", "float", "Scalar"]}
    name = chance.choice(_OPERATORS)
    for depth, inner in enumerate((name, "aten::empty")):
        args = {
            "External id": identifier + depth,
            "Record function id": 0,
            "Ev Idx": identifier + depth,
        } | dims
        yield _complete("cpu_op", inner, _HOST, thread, start + depth * 900, took // (1 + depth), args)
    launch = {"cbid": 211, "correlation": identifier, "External id": identifier}
    yield _complete("cuda_runtime", "cudaLaunchKernel", _HOST, thread, start + took - 3_500, 3_000, launch)
    kind = chance.random()
    device = {"External id": identifier, "queued": 0, "device": 0, "context": 1, "correlation": identifier}
    shape = {
        "registers per thread": 32,
        "shared memory": 0,
        "blocks per SM": 4.5,
        "warps per SM": 18.0,
        "grid": [size, 1, 1],
        "block": [128, 1, 1],
        "est. achieved occupancy %": 28,
    }
    if kind < 0.03:
        group = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "dtype": "Float"}
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        args = device | shape | group
        yield _on_device("kernel", name, _COMM, start + took, 90_000, args, free_ns, chance, lateness)
    elif kind < 0.06:
        copied = {"bytes": size * 4096, "memory bandwidth (GB/s)": 21.5}
        name = "Memcpy HtoD (Pageable -> Device)"
        yield _on_device("gpu_memcpy", name, _COPY, start + took, 30_000, device | copied, free_ns, chance)
    elif kind < 0.08:
        filled = {"bytes": size * 4}
        yield _on_device(
            "gpu_memset", "Memset (Device)", _COMPUTE, start + took, 1_500, device | filled, free_ns, chance
        )
    else:
        name = chance.choice(_KERNELS)
        yield _on_device("kernel", name, _COMPUTE, start + took, 20_000, device | shape, free_ns, chance)
    flow = {"cat": "ac2g", "name": "ac2g", "id": identifier, "pid": _HOST, "tid": thread}
    yield {"ph": "s", **flow, "ts": _microseconds(start + took - 3_500)}
    yield {"ph": "f", **flow, "ts": _microseconds(start + took), "bp": "e"}


def _on_device(
    category: str,
    name: str,
    stream: int,
    ready: int,
    longest: int,
    args: dict[str, Any],
    free_ns: dict[int, int],
    chance: random.Random,
    lateness: random.Random | None = None,
) -> dict[str, Any]:
    start = max(ready, free_ns[stream])
    took = chance.randrange(1_000, longest)
    free_ns[stream] = start + took
    late = lateness.randrange(took // 2) if lateness else 0
    return _complete(category, name, 0, stream, start + late, took - late, args | {"stream": stream})


def _complete(
    category: str, name: str, process: int, thread: int, start: int, took: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(start),
        "dur": took / 1000,
        "args": args,
    }


def _microseconds(nanoseconds: int) -> float:
    return _ORIGIN_US + nanoseconds / 1000
