"""Loops that are slow for one reason each, and the same loops with the advice applied, in virtual time.

They are twins of those in `benchmarks.gpu_proof.slow_loops`, with the times that an H200 and its host had.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.simulated_device.recorded import MS, US, Loop, Machine

GEMM: Final = "nvjet_tst_128x64_bf16"
_DRAW: Final = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_DRAW_READY: Final = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@dataclass(frozen=True, slots=True)
class Twin:
    """A slow loop and the change that its advice asks for.

    Attributes:
        rule: The rule that must find it; empty for a loop that nothing is wrong with.
        slow: The loop as it is.
        fixed: The loop with the change.
        batches: Batches of the slow loop that one step of the fixed one trains on.
        facts: What the client stores in the trace.
        more: Further fields of the trace.
        reserved: Bytes that the allocator has reserved of 100.
    """

    rule: str
    slow: Loop
    fixed: Loop
    batches: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=lambda: {"deviceProperties": [{"computeMajor": 9}]})
    reserved: int = 0


def _model(machine: Machine, operators: int, host_ns: int, kernel_ns: int, **args: Any) -> None:
    """Run a forward and a backward of so many operators each."""
    for _ in range(operators):
        machine.work(6 * US)
        machine.launch("aten::addmm", [(GEMM, kernel_ns)], host_ns, **args)
    for _ in range(operators):
        machine.work(2 * US)
        machine.launch(
            "autograd::engine::evaluate_function: AddmmBackward0", [(GEMM, kernel_ns)], host_ns, **args
        )


def _fused(machine: Machine, kernel_ns: int = 60 * US) -> None:
    def update() -> None:
        machine.work(20 * US)
        machine.launch("aten::_fused_adamw_", [("multi_tensor_apply", kernel_ns)], 60 * US)

    machine.span("Optimizer.step#AdamW.step", update)


def _each_parameter(machine: Machine, parameters: int, operators: int, kernel_ns: int = 3 * US) -> None:
    def update() -> None:
        for _ in range(parameters):
            for _ in range(operators):
                machine.work(3 * US)
                machine.launch("aten::mul_", [("elementwise", kernel_ns)], 8 * US)

    machine.span("Optimizer.step#AdamW.step", update)


def _loop(*parts: Callable[[Machine], None]) -> Loop:
    def begin(machine: Machine) -> Callable[[], None]:
        def step() -> None:
            for part in parts:
                part(machine)

        return step

    return begin


def _graph(operators: int, kernel_ns: int) -> Callable[[Machine], None]:
    return lambda machine: machine.launch(
        "CompiledFunction", [(GEMM, kernel_ns)] * (2 * operators), 60 * US, call="cudaGraphLaunch"
    )


def tiny_kernels(scale: float = 1.0) -> Twin:
    """Launch short kernels one by one, or as a graph."""
    kernel = round(4 * US * scale)
    return Twin(
        "tiny-kernels",
        _loop(lambda machine: _model(machine, 100, 18 * US, kernel), _fused),
        _loop(_graph(100, kernel), _fused),
    )


def batch_size(scale: float = 1.0) -> Twin:
    """Train on a batch that is too small for the host to keep up, or on one of twice the size."""
    kernel = round(16 * US * scale)
    return Twin(
        "batch-size",
        _loop(lambda machine: _model(machine, 90, 32 * US, kernel), _fused),
        _loop(lambda machine: _model(machine, 90, 32 * US, 2 * kernel), _fused),
        batches=2,
        reserved=20,
    )


def needless_synchronisation(scale: float = 1.0) -> Twin:
    """Read the norm of each gradient, or leave them on the device."""

    def norms(reads: bool) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            for _ in range(round(90 * scale)):
                machine.work(4 * US)
                machine.launch("aten::linalg_vector_norm", [("reduce_kernel", 6 * US)], 14 * US)
                if reads:
                    machine.item()

        return part

    def model(machine: Machine) -> None:
        _model(machine, 60, 20 * US, 100 * US)

    return Twin(
        "needless-synchronisation", _loop(model, norms(True), _fused), _loop(model, norms(False), _fused)
    )


def host_compute(scale: float = 1.0) -> Twin:
    """Draw the noise of each step on the host, or on the device."""

    def noise(on_host: bool) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            if on_host:
                machine.compute("aten::normal_", round(10 * MS * scale))
                machine.copy_in(1 << 21, pinned=False)
            else:
                machine.launch("aten::normal_", [("distribution_elementwise", 12 * US)])

        return part

    def model(machine: Machine) -> None:
        _model(machine, 12, 20 * US, 50 * US)

    return Twin("host-compute", _loop(noise(True), model, _fused), _loop(noise(False), model, _fused))


def fused_optimizer(scale: float = 1.0) -> Twin:
    """Update parameter by parameter, or all in one kernel."""

    def model(machine: Machine) -> None:
        _model(machine, 60, 20 * US, 110 * US)

    parameters = round(148 * scale)
    return Twin(
        "fused-optimizer",
        _loop(
            model, lambda machine: _each_parameter(machine, parameters, 12), lambda machine: machine.item()
        ),
        _loop(model, lambda machine: _fused(machine, 36 * US * parameters), lambda machine: machine.item()),
    )


def pin_memory(scale: float = 1.0) -> Twin:
    """Copy batches from pageable memory, or from pinned memory."""

    def copy(pinned: bool) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            machine.span(_DRAW_READY, lambda: machine.work(200 * US))
            machine.copy_in(round(77_000_000 * scale), pinned=pinned)

        return part

    def model(machine: Machine) -> None:
        _model(machine, 40, 25 * US, 320 * US)

    return Twin("pin-memory", _loop(copy(False), model, _fused), _loop(copy(True), model, _fused))


def loader_workers(scale: float = 1.0) -> Twin:
    """Make batches in the training process, or in workers."""

    def draw(name: str, ns: int) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            machine.span(name, lambda: machine.work(ns))
            machine.copy_in(3_500_000, pinned=True)

        return part

    def model(machine: Machine) -> None:
        _model(machine, 12, 40 * US, 90 * US)

    made = round(14 * MS * scale)
    phases = {"data": made, "forward": 500 * US, "backward": 700 * US, "optimizer": 100 * US}
    loader = {
        "workers": 0,
        "cpus": 16.0,
        "draw_cpu": 1.0,
        "rest_cpus": 1.0,
        "batch_tensors": 2,
        "batch_size": 64,
    }
    return Twin(
        "loader-workers",
        _loop(draw(_DRAW, made), model, _fused),
        _loop(draw(_DRAW_READY, 300 * US), model, _fused),
        facts={"unrecorded_phase_ns": phases, "loader": loader},
    )


def whole_batches(scale: float = 1.0) -> Twin:
    """Index a dataset of tensors item by item, or batch by batch."""
    made = round(3.1 * MS * scale)

    def draw(ns: int) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            machine.span(_DRAW, lambda: machine.work(ns))
            machine.copy_in(524_288, pinned=True)

        return part

    def model(machine: Machine) -> None:
        _model(machine, 14, 40 * US, 50 * US)

    phases = {"data": made, "forward": 600 * US, "backward": 600 * US, "optimizer": 100 * US}
    loader = {
        **{"workers": 0, "cpus": 16.0, "draw_cpu": 1.0, "rest_cpus": 1.0},
        **{
            "batch_tensors": 2,
            "batch_size": 512,
            "batch_bytes": 524_288,
            "indexable": True,
            "shuffles": True,
        },
    }
    return Twin(
        "whole-batches",
        _loop(draw(made), model, _fused),
        _loop(draw(150 * US), model, _fused),
        facts={"unrecorded_phase_ns": phases, "loader": loader},
    )


def hidden_loader() -> Twin:
    """Make batches in 8 ms of each step, while the device computes for 33 ms."""

    def step(machine: Machine) -> None:
        machine.span(_DRAW, lambda: machine.work(8 * MS))
        machine.copy_in(3_500_000, pinned=True)
        _model(machine, 60, 25 * US, 270 * US)
        _fused(machine)

    return Twin(
        "", _loop(step), _loop(step), facts={"unrecorded_phase_ns": {"data": 8 * MS, "forward": 4 * MS}}
    )


def small_images() -> Twin:
    """ResNet-18 on 8 small images: the host bounds the step, and nothing else is wrong."""
    return tiny_kernels(1.5)


def zero_grad(scale: float = 1.0) -> Twin:
    """Fill large gradients with zeros and add to them, or drop them."""
    kernel = round(110 * US * scale)

    def step(fills: bool) -> Callable[[Machine], None]:
        def part(machine: Machine) -> None:
            def fill() -> None:
                for _ in range(7):
                    machine.launch("aten::zero_", [("fill", kernel // 2)], 10 * US)

            if fills:
                machine.span("Optimizer.zero_grad#SGD.zero_grad", fill)
            _model(machine, 7, 20 * US, 250 * US)
            for _ in range(7):
                name = "torch::autograd::AccumulateGrad"

                def accumulate() -> None:
                    machine.work(4 * US)
                    if fills:
                        machine.launch("aten::add_", [("add", kernel)], 10 * US)

                machine.span(name, accumulate)

        return part

    return Twin("zero-grad", _loop(step(True), _fused), _loop(step(False), _fused))


def mixed_precision(scale: float = 1.0) -> Twin:
    """Train in single precision, or half: products take half of the time."""
    kernel = round(200 * US * scale)

    def model(length: int) -> Callable[[Machine], None]:
        return lambda machine: _model(machine, 50, 20 * US, length, dtype="float")

    def in_single(machine: Machine) -> None:
        for _ in range(100):
            machine.work(4 * US)
            machine.launch("aten::addmm", [("sm80_xmma_gemm_f32f32_tf32f32", kernel)], 20 * US, dtype="float")

    return Twin("mixed-precision", _loop(in_single, _fused), _loop(model(kernel // 2), _fused))


TWINS: Final[dict[str, Callable[[float], Twin]]] = {
    "tiny-kernels": tiny_kernels,
    "batch-size": batch_size,
    "needless-synchronisation": needless_synchronisation,
    "host-compute": host_compute,
    "fused-optimizer": fused_optimizer,
    "pin-memory": pin_memory,
    "loader-workers": loader_workers,
    "whole-batches": whole_batches,
    "zero-grad": zero_grad,
    "mixed-precision": mixed_precision,
}
