"""Slow training loops, each with its tuned version, which the analyser must distinguish.

Each builder returns one training step of one process on the CPU. ``tuned`` is the loop after the change. Of
each rule there are several loops, of models and sizes that have little in common: a rule that is right about
one of them only would have learnt it by heart.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from benchmarks.advice import models
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

Step = Callable[[], None]
Build = Callable[[bool], Step]


@dataclass(frozen=True, slots=True)
class Script:
    """A slow loop and its remedy.

    Attributes:
        rule: The rule that must find it.
        build: Returns the loop's step, before (False) or after (True) the advice is taken.
        processes: How many processes run it together.
        heard_again: The rule may rightly speak to the tuned loop too.
        attached: The client samples the loop and writes what it knows into captures; else these are as traces
            of another origin.
    """

    rule: str
    build: Build
    processes: int = 1
    heard_again: bool = False
    attached: bool = False


class _Items(torch.utils.data.Dataset[torch.Tensor]):
    """Items that have to be waited for.

    Args:
        item: What each looks like.
        read_s: How long, on average, as for a disk or an object store: time, and no CPU.
    """

    def __init__(self, item: torch.Tensor, read_s: float) -> None:
        self._item, self._read_s = item, read_s

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._read_s:
            # Every fourth item takes four times as long as the others.
            time.sleep(self._read_s * (16 if index % 4 == 0 else 4) / 7)
        return self._item.clone()


def _loaded(items: _Items, batch: int, workers: int) -> Callable[[], torch.Tensor]:
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = torch.utils.data.DataLoader(items, batch_size=batch, num_workers=workers, **options)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    batches = endless()
    return lambda: next(batches)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, **options)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], torch.Tensor],
    *,
    to_none: bool = True,
    micro_batches: int = 1,
) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(micro_batches):
            model(batch()).square().mean().backward()
        optimizer.step()

    return step


def loader_mlp(tuned: bool) -> Step:
    """Wait for each batch in the training process, or in as many workers as keep up."""
    batch = _loaded(_Items(torch.ones(1024), 0.001), 16, 2 if tuned else 0)
    model = models.mlp(1024, 4)
    return _train(model, _sgd(model), lambda: batch().repeat(8, 1))


def loader_lstm(tuned: bool) -> Step:
    """Wait longer than the step computes, so that several workers are needed."""
    batch = _loaded(_Items(models.tokens(1, 24)[0], 0.001), 20, 8 if tuned else 0)
    model = models.lstm(64)
    return _train(model, torch.optim.AdamW(model.parameters(), fused=True), batch)


def loader_too_few(tuned: bool) -> Step:
    """Wait for one worker, or half as long for two."""
    batch = _loaded(_Items(torch.ones(256), 0.002), 16, 2 if tuned else 1)
    model = models.mlp(256, 6)
    return _train(model, _sgd(model), lambda: batch().repeat(16, 1))


def loader_sampled(tuned: bool) -> Step:
    """Wait for each batch where the client has seen that the loader waits, and does not compute."""
    batch = _loaded(_Items(torch.ones(512), 0.002), 12, 6 if tuned else 0)
    model = models.mlp(512, 8)
    return _train(model, _sgd(model), lambda: batch().repeat(16, 1))


def _from_memory(dataset: TensorDataset, batch: int, *, whole: bool) -> Callable[[], list[torch.Tensor]]:
    """Return what draws batches of tensors in memory: indexed item by item, or as a whole."""
    if whole:
        order = BatchSampler(RandomSampler(dataset), batch, drop_last=False)
        loader = DataLoader(dataset, batch_size=None, sampler=order)
    else:
        loader = DataLoader(dataset, batch_size=batch, shuffle=True)

    def endless() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    batches = endless()
    return lambda: next(batches)


def _classify(model: nn.Module, draw: Callable[[], list[torch.Tensor]]) -> Step:
    optimizer = _sgd(model)

    def step() -> None:
        x, y = draw()
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x).flatten(1), y))
        optimizer.step()

    return step


def whole_batches_mlp(tuned: bool) -> Step:
    """Index rows one by one, or all of a batch at once."""
    data = TensorDataset(torch.rand(8192, 64), torch.randint(64, (8192,)))
    return _classify(models.mlp(64, 4), _from_memory(data, 128, whole=tuned))


def whole_batches_lstm(tuned: bool) -> Step:
    """The same of short texts."""
    data = TensorDataset(models.tokens(4096, 6), torch.randint(16, (4096,)))
    return _classify(models.lstm(32), _from_memory(data, 128, whole=tuned))


def whole_batches_convnet(tuned: bool) -> Step:
    """The same of small images, in large batches."""
    data = TensorDataset(torch.rand(4096, 3, 8, 8), torch.randint(16, (4096,)))
    return _classify(models.convnet(8, 1), _from_memory(data, 256, whole=tuned))


def float64_mlp(tuned: bool) -> Step:
    """Train in double precision, or in single."""
    dtype = torch.float32 if tuned else torch.float64
    model, x = models.mlp(512, 6, dtype), torch.ones(512, 512, dtype=dtype)
    return _train(model, _sgd(model), lambda: x)


def float64_transformer(tuned: bool) -> Step:
    """The same of attention, normalisation and softmax."""
    model, x = models.transformer(128, 2), models.tokens(8, 48)
    model = model if tuned else model.double()
    return _train(model, _sgd(model), lambda: x)


def float64_convnet(tuned: bool) -> Step:
    """The same of convolutions."""
    model, x = models.convnet(24, 3), torch.ones(8, 3, 16, 16)
    model, x = (model, x) if tuned else (model.double(), x.double())
    return _train(model, _sgd(model), lambda: x)


def optimizer_mlp(tuned: bool) -> Step:
    """Update two hundred small parameters one by one, or all in one operator."""
    model, x = models.mlp(48, 100), torch.ones(64, 48)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=tuned), lambda: x)


def optimizer_transformer(tuned: bool) -> Step:
    """The same of parameters of all sizes, for a step with a short text."""
    model, x = models.transformer(256, 3), models.tokens(2, 12)
    return _train(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=tuned), lambda: x)


def optimizer_lstm(tuned: bool) -> Step:
    """The same of another optimizer and of one very large parameter."""
    model, x = models.lstm(64, 2, words=40_000), models.tokens(8, 8, words=40_000)
    return _train(model, torch.optim.Adagrad(model.parameters(), lr=1e-3, fused=tuned), lambda: x)


# Gradients of 25 MB and more: where they just fit into a cache, no two processes take the same time.


def zero_grad_lstm(tuned: bool) -> Step:
    """Fill the gradient of a large embedding with zeros and add to it, or let the new one take its place."""
    model, x = models.lstm(64, words=120_000), models.tokens(8, 8, words=120_000)
    return _train(model, _sgd(model), lambda: x, to_none=tuned)


def zero_grad_tables(tuned: bool) -> Step:
    """The same of the tables of a recommender, each of another size."""
    sizes = (30_000, 60_000, 90_000)
    model, x = models.Tables(sizes, 64), models.rows_of(sizes, 64)
    return _train(model, _sgd(model), lambda: x, to_none=tuned)


def zero_grad_transformer(tuned: bool) -> Step:
    """The same with two micro-batches, of which the second must add in any case."""
    model, x = models.transformer(128, 1, words=100_000), models.tokens(2, 16, words=100_000)
    return _train(model, _sgd(model), lambda: x, to_none=tuned, micro_batches=2)


def operators_mlp(tuned: bool) -> Step:
    """Normalise a batch row by row, or as a whole, before a model sees it."""
    model, x = models.mlp(64, 4), torch.ones(512, 64)
    scale, shift = torch.full((64,), 2.0), torch.full((64,), 0.5)

    def rows() -> torch.Tensor:
        if tuned:
            return x * scale + shift
        result = torch.empty_like(x)
        for row in range(len(x)):
            result[row] = x[row] * scale + shift
        return result

    return _train(model, _sgd(model), rows)


def operators_loss(tuned: bool) -> Step:
    """Take the loss of a convolutional network sample by sample, or of the batch; backward follows."""
    model, x = models.convnet(8, 2), torch.rand(256, 3, 8, 8)
    labels, optimizer = torch.randint(16, (256,)), _sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        scores = model(x)
        if tuned:
            loss = nn.functional.cross_entropy(scores, labels)
        else:
            pairs = zip(scores, labels, strict=True)
            loss = torch.stack([nn.functional.cross_entropy(*pair) for pair in pairs]).mean()
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def operators_attention(tuned: bool) -> Step:
    """Attend for each sample and each head, or for all at once."""
    project = nn.Linear(128, 3 * 128)
    x, optimizer = torch.rand(24, 16, 128), _sgd(project)

    def step() -> None:
        optimizer.zero_grad()
        parts = project(x).view(24, 16, 3, 8, 16).permute(2, 0, 3, 1, 4)
        if tuned:
            attended = (parts[0] @ parts[1].transpose(-1, -2)).softmax(-1) @ parts[2]
        else:
            query, key, value = (part.reshape(-1, 16, 16).unbind() for part in parts)
            attended = torch.stack(
                [(q @ k.t()).softmax(-1) @ v for q, k, v in zip(query, key, value, strict=True)]
            )
        attended.square().mean().backward()
        optimizer.step()

    return step


def _accumulate(model: nn.Module, x: torch.Tensor, micro_batches: int, tuned: bool, **options: Any) -> Step:
    parallel = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = _sgd(parallel)

    def step() -> None:
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with parallel.no_sync() if tuned and not last else contextlib.nullcontext():
                parallel(x).square().mean().backward()
        optimizer.step()

    return step


def accumulation_mlp(tuned: bool) -> Step:
    """Exchange gradients after each of four micro-batches, or after the last; for two processes."""
    return _accumulate(models.mlp(768, 6), torch.ones(16, 768), 4, tuned)


def accumulation_transformer(tuned: bool) -> Step:
    """The same of two micro-batches, with gradients that are parts of the buckets."""
    return _accumulate(
        models.transformer(256, 3), models.tokens(4, 24), 2, tuned, gradient_as_bucket_view=True
    )


def accumulation_convnet(tuned: bool) -> Step:
    """The same of eight, with buffers to send, many small parameters, and much to compute."""
    return _accumulate(models.convnet(16, 12), torch.ones(8, 3, 16, 16), 8, tuned)


def well_tuned_mlp() -> Step:
    """Train a model whose operators are large, with nothing in their way."""
    model, x = models.mlp(1024, 4), torch.ones(256, 1024)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), lambda: x)


def well_tuned_transformer() -> Step:
    """Train on batches that a worker has ready, in two micro-batches."""
    model, x = models.transformer(192, 3), models.tokens(1, 64)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    return _train(model, optimizer, _loaded(_Items(x, 0.0), 16, 1), micro_batches=2)


def well_tuned_convnet() -> Step:
    """Train a convolutional network by plain SGD."""
    model, x = models.convnet(32, 4), torch.rand(16, 3, 24, 24)
    return _train(model, _sgd(model), lambda: x)


SCRIPTS: Final[dict[str, Script]] = {
    "loader-mlp": Script("loader-workers", loader_mlp),
    "loader-lstm": Script("loader-workers", loader_lstm),
    "loader-too-few": Script("loader-workers", loader_too_few, heard_again=True),
    "loader-sampled": Script("loader-workers", loader_sampled, attached=True),
    "whole-batches-mlp": Script("whole-batches", whole_batches_mlp, attached=True),
    "whole-batches-lstm": Script("whole-batches", whole_batches_lstm, attached=True),
    "whole-batches-convnet": Script("whole-batches", whole_batches_convnet, attached=True),
    "float64-mlp": Script("float64", float64_mlp),
    "float64-transformer": Script("float64", float64_transformer),
    "float64-convnet": Script("float64", float64_convnet),
    "optimizer-mlp": Script("fused-optimizer", optimizer_mlp),
    "optimizer-transformer": Script("fused-optimizer", optimizer_transformer),
    "optimizer-lstm": Script("fused-optimizer", optimizer_lstm),
    "zero-grad-lstm": Script("zero-grad", zero_grad_lstm),
    "zero-grad-tables": Script("zero-grad", zero_grad_tables),
    "zero-grad-transformer": Script("zero-grad", zero_grad_transformer),
    "operators-mlp": Script("small-operators", operators_mlp),
    "operators-loss": Script("small-operators", operators_loss),
    "operators-attention": Script("small-operators", operators_attention),
    "accumulation-mlp": Script("gradient-accumulation", accumulation_mlp, processes=2),
    "accumulation-transformer": Script("gradient-accumulation", accumulation_transformer, processes=2),
    "accumulation-convnet": Script("gradient-accumulation", accumulation_convnet, processes=2),
}
"""By name."""

WELL_TUNED: Final[dict[str, Callable[[], Step]]] = {
    "well-tuned-mlp": well_tuned_mlp,
    "well-tuned-transformer": well_tuned_transformer,
    "well-tuned-convnet": well_tuned_convnet,
}
"""Loops without any advice, by name."""
