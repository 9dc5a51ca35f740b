"""Pairs of functions that compute the same, of different speed."""

from typing import Final

import torch

PAIRS: Final = (
    ("add", "add_again"),
    ("hypotenuse", "hypotenuse_by_hand"),
    ("softmax", "softmax_by_hand"),
    ("products", "products_by_hand"),
    ("normalise", "normalise_by_hand"),
    ("rows", "rows_by_hand"),
)
"""The first function of a pair is what the second one is compared with."""


def data() -> torch.Tensor:
    """Return what all functions are called with."""
    return torch.rand(256, 512, generator=torch.Generator().manual_seed(0))


def add(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def add_again(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def hypotenuse(x: torch.Tensor) -> torch.Tensor:
    """Return the length of vectors of two equal components, by one operator."""
    return torch.hypot(x, x)


def hypotenuse_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The same by four."""
    return (x * x + x * x).sqrt()


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def softmax_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The same by five."""
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def products(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t()


def products_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The same in double precision."""
    return (x.double() @ x.double().t()).float()


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Return rows of mean 0 and variance 1, by one operator."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def normalise_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The same by seven."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, by one operator."""
    return x.sum(-1)


def rows_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The same row by row."""
    return torch.stack([row.sum() for row in x])
