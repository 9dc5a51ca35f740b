"""Three implementations of one dataset: satellite images of 13 bands, three of which are used."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

COUNT = 256
BANDS = (3, 2, 1)


class Compressed(Dataset):
    """Reads a compressed file: all 13 bands have to be unpacked to use three."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.labels = torch.randint(0, 10, (COUNT,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> np.ndarray:
        with np.load(self.directory / f"{index}.npz") as file:
            return file["bands"][list(BANDS)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = np.clip(self.read(index) / 4000, 0, 1)
        return torch.tensor(image, dtype=torch.float), self.labels[index]


class Plain(Compressed):
    """Reads a file without compression, and of it only the three bands."""

    def read(self, index: int) -> np.ndarray:
        return np.load(self.directory / f"{index}.npy", mmap_mode="r")[list(BANDS)]


class InTorch(Plain):
    """The same, and normalises in single precision, in torch."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.from_numpy(self.read(index).astype(np.float32))
        return image.div_(4000).clamp_(0, 1), self.labels[index]


def files() -> Path:
    """Return the folder of the images below the working directory, which is made at the first call."""
    directory = Path("bands")
    if not (directory / "done").exists():
        directory.mkdir(exist_ok=True)
        random = np.random.default_rng(0)
        for index in range(COUNT):
            bands = random.integers(0, 4000, (13, 64, 64), dtype=np.uint16)
            np.savez_compressed(directory / f"{index}.npz", bands=bands)
            np.save(directory / f"{index}.npy", bands)
        (directory / "done").touch()
    return directory


def draw(dataset: Dataset, batch_size: int) -> None:
    """Draw 64 images."""
    for _ in zip(range(64 // batch_size), DataLoader(dataset, batch_size=batch_size), strict=False):
        pass


def compressed(batch_size: int) -> None:
    draw(Compressed(files()), batch_size)


def plain(batch_size: int) -> None:
    draw(Plain(files()), batch_size)


def in_torch(batch_size: int) -> None:
    draw(InTorch(files()), batch_size)
