"""FLOPs of a step: counted by hand, counted by torch, and nothing computed differently for it."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.torches import needs_flops
from torch import nn
from torch.nn import functional
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torchperfd.hooks.accelerator import peak_flops
from torchperfd.hooks.flops import StepFlops

pytestmark = needs_flops


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever other tests of this process have compiled; and no mode is left on."""
    from torch._dynamo import reset, utils

    reset()
    monkeypatch.setitem(utils.counters, "stats", type(utils.counters["stats"])())
    yield
    assert _get_current_dispatch_mode() is None


def count(step: Callable[[], object], flops: StepFlops | None = None) -> StepFlops:
    flops = flops or StepFlops(first=1)
    flops.train_edge(1)
    step()
    flops.train_edge(2)
    return flops


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: Callable[..., Any], batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


# What it comes to, by hand: a product of (n, k) and (k, m) is 2nkm operations.


def test_an_mlp() -> None:
    model, batch = mlp(), torch.randn(32, 64)
    forward = 2 * 32 * 64 * 128 + 2 * 32 * 128 * 10
    # Backward: the gradients of both weights, and of the second layer's input; the first's is not needed.
    backward = forward + 2 * 32 * 128 * 10

    counted = count(lambda: train(model, batch))
    assert counted.flops == forward + backward
    assert (counted.precision, counted.reason, counted.ended) == ("fp32", "", True)


def test_a_convolution() -> None:
    model, batch = nn.Conv2d(3, 8, kernel_size=5, bias=False), torch.randn(4, 3, 12, 12)
    forward = 2 * 4 * (8 * 8 * 8) * (3 * 5 * 5)
    assert count(lambda: train(model, batch)).flops == 2 * forward


@pytest.mark.parametrize("written_out", [True, False], ids=["products", "fused"])
def test_a_transformer_block(written_out: bool) -> None:
    batch, heads, tokens, width = 2, 4, 16, 32
    each = width // heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.view(batch, tokens, heads, each).transpose(1, 2)
                for part in self.project(self.before(x)).chunk(3, dim=-1)
            )
            if written_out:
                seen = ((q @ k.transpose(-2, -1)) / each**0.5).softmax(-1) @ v
            else:
                seen = functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
            summed: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
            return summed

    linear = 2 * (batch * tokens) * (width * 3 * width + width * width + 2 * width * 4 * width)
    attention = 2 * 2 * (batch * heads) * tokens * tokens * each
    # Backward: gradients of weights and inputs, all asked for; the fused kernel computes the scores again.
    expected = 3 * linear + 3 * attention + (0 if written_out else attention // 2)

    model = Block()
    assert count(lambda: train(model, torch.randn(batch, tokens, width))).flops == expected


def test_what_runs_in_inference_mode_counts_as_well() -> None:
    teacher, batch = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)), torch.randn(
        2, 3, 8, 8
    )  # fmt: skip
    query = torch.randn(2, 3, 5, 8)

    def step() -> None:
        with torch.inference_mode():
            teacher(batch)
            batch[0, 0] @ batch[0, 1]
            functional.scaled_dot_product_attention(query, query, query)

    expected = 2 * 2 * (4 * 6 * 6) * (3 * 3 * 3) + 2 * 2 * (4 * 6 * 6) * 5 + 2 * 8 * 8 * 8
    assert count(step).flops == expected + 2 * 2 * (2 * 3) * 5 * 5 * 8


def test_all_micro_batches_of_a_step_count() -> None:
    model, batch = mlp(), torch.randn(32, 64)
    once = count(lambda: train(model, batch)).flops
    assert once is not None
    assert count(lambda: [train(model, batch) for _ in range(3)]).flops == 3 * once


def test_the_precision_is_that_of_most_operations() -> None:
    model, batch = mlp(), torch.randn(32, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        torch.ones(2, 2) @ torch.ones(2, 2)

    assert count(step).precision == "bf16"


def test_products_that_may_be_tf32_are_said_to_be() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert count(lambda: train(mlp(), torch.randn(2, 64))).precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


# Training is what it would have been.


def fit(watcher: StepFlops | None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 62, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for index in range(6):
        loss = functional.cross_entropy(model(torch.randn(16, 1, 64)), torch.randint(10, (16,)))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if watcher is not None:
            watcher.train_edge(index + 1)
    return [*losses, *model.state_dict().values()]


def test_training_is_the_same_bit_by_bit() -> None:
    watcher = StepFlops()
    assert all(torch.equal(one, other) for one, other in zip(fit(None), fit(watcher), strict=True))
    assert watcher.flops


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert fit(StepFlops())
    assert capfd.readouterr() == ("", "")


def test_an_exception_of_the_script_is_the_scripts() -> None:
    model, flops = mlp(), StepFlops(first=1)
    flops.train_edge(1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 3))
    assert not flops.ended
    train(model, torch.randn(32, 64))
    flops.train_edge(2)
    assert flops.flops


def test_an_error_in_a_formula_of_torch_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, broken)
    model = mlp()
    counted = count(lambda: train(model, torch.randn(32, 64)))
    assert counted.flops is None
    assert counted.reason == "torch cannot count aten.mm.default: shapes are incompatible"
    assert model[0].weight.grad is not None


def test_a_mode_that_torch_refuses_costs_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(TorchDispatchMode, "__enter__", refuse)
    counted = count(lambda: None)
    assert (counted.reason, counted.ended) == ("torch cannot count: not today", True)


# Why not.


def test_a_step_without_such_operators_has_a_reason() -> None:
    counted = count(lambda: torch.ones(3) + 1)
    assert counted.flops is None
    assert counted.reason.startswith("no operator that torch can count has run")


def test_steps_of_compiled_code_are_left_alone() -> None:
    compiled = torch.compile(mlp(), backend="aot_eager", fullgraph=True)
    train(compiled, torch.randn(32, 64))
    flops = StepFlops(first=1)
    flops.train_edge(1)
    assert _get_current_dispatch_mode() is None
    assert flops.reason == "the script runs compiled code, in which nothing can be counted"


def test_a_first_compilation_within_the_step_is_undisturbed() -> None:
    from torch._dynamo.utils import counters

    compiled, batch = torch.compile(mlp(), backend="aot_eager", fullgraph=True), torch.randn(32, 64)
    counted = count(lambda: train(compiled, batch))
    assert counted.reason == "the script runs compiled code, in which nothing can be counted"
    train(compiled, batch)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_torch_that_would_be_in_the_way_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TorchDispatchMode, "ignore_compile_internals")
    flops = StepFlops(first=1)
    flops.train_edge(1)
    assert flops.reason.endswith("a newer one can")


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of the script's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_nothing_is_counted_within_a_mode_of_the_scripts_own() -> None:
    flops = StepFlops(first=1)
    with Mode():  # type: ignore[no-untyped-call]
        flops.train_edge(1)
    assert flops.reason == "a dispatch mode of the script's own is active"


def test_count_waits_for_a_dispatch_mode_begun_within_the_step() -> None:
    flops = StepFlops(first=1)
    flops.train_edge(1)
    with Mode() as own:  # type: ignore[no-untyped-call]
        flops.train_edge(2)
        assert _get_current_dispatch_mode() is own
        assert not flops.ended
    flops.train_edge(3)
    assert flops.ended
    assert flops.flops is None
    assert flops.reason == "another dispatch mode was begun within the step"


# Which step.


def test_steps_before_the_first_are_not_counted() -> None:
    flops = StepFlops(first=3)
    for index in (1, 2):
        flops.train_edge(index)
        assert _get_current_dispatch_mode() is None
    flops.train_edge(3)
    assert _get_current_dispatch_mode() is not None
    flops.train_edge(4)


def test_a_validation_step_is_not_taken_for_a_training_step() -> None:
    model, batch = mlp(), torch.randn(32, 64)
    flops = StepFlops(first=1)
    flops.train_edge(1)
    model(batch)
    flops.validate_edge()
    train(model, batch)
    flops.train_edge(2)
    assert flops.flops == count(lambda: train(model, batch)).flops


def test_a_long_validation_costs_two_attempts_only() -> None:
    model, batch = mlp(), torch.randn(32, 64)
    flops = StepFlops(first=1)
    flops.train_edge(1)
    slow = 0
    for _ in range(50):
        slow += _get_current_dispatch_mode() is not None
        model(batch)
        flops.validate_edge()
    assert slow == 2
    flops.train_edge(2)
    train(model, batch)
    flops.train_edge(3)
    assert flops.flops == count(lambda: train(model, batch)).flops


def test_a_loop_that_only_ever_validates_is_given_up() -> None:
    flops = StepFlops(first=1)
    for index in range(1, 4):
        flops.train_edge(index)
        flops.validate_edge()
        flops.validate_edge()
    assert flops.reason == "training and validation steps alternate too fast"
    assert flops.ended


def test_the_end_of_the_loop_ends_the_count() -> None:
    flops = StepFlops(first=1)
    flops.train_edge(1)
    flops.abandon("training ended before a step was counted")
    assert _get_current_dispatch_mode() is None
    assert flops.reason == "training ended before a step was counted"
    assert flops.ended


def test_what_was_counted_outlives_the_loop() -> None:
    counted = count(lambda: train(mlp(), torch.randn(32, 64)))
    counted.abandon("training ended")
    assert counted.flops
    assert counted.reason == ""


# Of operators that stand for others.


@contextmanager
def four_ranks() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


def test_of_a_tensor_parallel_model_this_ranks_part_counts() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, batch = mlp(), torch.randn(32, 64, requires_grad=True)
    model[2] = nn.Linear(128, 12)
    whole = count(lambda: train(copy.deepcopy(model), batch)).flops
    assert whole is not None
    with four_ranks() as mesh:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert count(lambda: train(model, batch)).flops == whole // 4


# The peak.


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "tf32", 183),
        ("NVIDIA A10G", "bf16", 70),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_the_peak_of_a_device(name: str, precision: str, tera: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("Tesla T4", "tf32"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("GRID A100-10C", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("NVIDIA A10", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("Tesla V100S-PCIE-32GB", "fp16"),
        ("", "bf16"),
    ],
)
def test_what_is_not_known_has_no_peak(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_counting_does_not_load_the_compiler() -> None:
    assert "torch.utils.flop_counter" in sys.modules
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", "import sys, torchperfd.hooks.flops; print('torch._inductor' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "False"
