"""Train a ResNet-18 on images whose brightness is changed at random, image by image."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

sys.path.append(str(Path(__file__).resolve().parents[1]))
from resnet import resnet18

BATCH, STEPS = 128, 40
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 2


def augment(images: torch.Tensor) -> torch.Tensor:
    """Normalise each image, then change its contrast and its brightness at random."""
    changed = []
    for image in images:
        channels = torch.stack([(channel - channel.mean()) / channel.std() for channel in image])
        contrast, brightness = 0.8 + 0.4 * torch.rand(()), 0.4 * torch.rand(()) - 0.2
        changed.append(channels * contrast + brightness)
    return torch.stack(changed)


def main() -> None:
    torch.manual_seed(0)
    client = torchperfd.attach()
    data = TensorDataset(torch.rand(BATCH * STEPS, 3, 32, 32), torch.randint(0, 10, (BATCH * STEPS,)))
    model = resnet18(width=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for images, labels in loader:
            with client.phase("augment"):
                images = augment(images)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
