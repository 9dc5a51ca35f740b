"""Small models of several kinds, each with the shape of its input: what the training loops train."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

WORDS: Final = 512
"""How many different tokens the models of text know."""


def mlp(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


class Text(nn.Module):
    """An embedding, what reads it, and a linear layer; the input is ``(batch, length)`` of tokens.

    Args:
        reader: Maps ``(batch, length, width)`` to the same shape.
        width: Of the embedding.
        words: How many different tokens there are.
    """

    def __init__(self, reader: nn.Module, width: int, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.reader = reader
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, 16)``."""
        read = self.reader(self.embedding(tokens))
        head: torch.Tensor = self.head((read[0] if isinstance(read, tuple) else read).mean(1))
        return head


def lstm(width: int, layers: int = 1, words: int = WORDS) -> Text:
    return Text(nn.LSTM(width, width, layers, batch_first=True), width, words)


def transformer(width: int, layers: int, heads: int = 4, words: int = WORDS) -> Text:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return Text(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), width, words)


class Tables(nn.Module):
    """Embeddings of several columns, and a perceptron; the input is ``(batch, columns)`` of row numbers.

    Args:
        sizes: The rows of each table.
        width: Of all tables.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.head = mlp(width * len(sizes), 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, columns * width)``."""
        found = [table(column) for table, column in zip(self.tables, rows.unbind(1), strict=True)]
        head: torch.Tensor = self.head(torch.cat(found, 1))
        return head


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body: torch.Tensor = self.body(x)
        return x + body


def convnet(width: int, depth: int) -> nn.Sequential:
    """Return residual blocks of convolutions; the input is ``(batch, 3, height, height)``."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(_Residual(width) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 16),
    )


def tokens(batch: int, length: int, words: int = WORDS) -> torch.Tensor:
    """Return random text, ``(batch, length)``."""
    return torch.randint(words, (batch, length))


def rows_of(sizes: Sequence[int], batch: int) -> torch.Tensor:
    """Return random rows of tables, ``(batch, columns)``."""
    return torch.stack([torch.randint(size, (batch,)) for size in sizes], 1)
