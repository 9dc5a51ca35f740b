"""Train and validate a ResNet-18 with a table of phases, a logger, and one optimizer or another."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

sys.path.append(str(Path(__file__).resolve().parents[1]))
from resnet import resnet18


class PrintLogger:
    """Prints the speed and the longest phases, as the loggers for W&B, TensorBoard and MLflow chart them."""

    every_steps = 40

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        prefix = "torchperfd_phases/"
        found = [name for name in metrics if name.startswith(prefix)]
        phases = {name.removeprefix(prefix): metrics[name] for name in found}
        longest = sorted(phases, key=lambda name: -phases[name])[:3]
        speed = metrics["torchperfd/samples_per_second"]
        print(
            f"step {step:>3}  {speed:,.0f} samples/s",
            *(f"{name} {phases[name]:.0%}" for name in longest),
            sep="  ",
        )

    def log_table(self, report: Any) -> None:
        Path("phases.md").write_text(report.to_markdown())
        Path("phases.csv").write_text(report.to_csv())

    def close(self) -> None:
        pass


def loader(count: int) -> DataLoader:
    data = TensorDataset(torch.rand(count, 3, 32, 32), torch.randint(0, 10, (count,)))
    return DataLoader(data, batch_size=16, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torchperfd.attach(loggers=[PrintLogger()])
    model = resnet18(width=8)
    way = {"fused": True} if options.fused else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **way)
    train, valid = loader(16 * 60), loader(16 * 10)
    for _ in range(3):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for images, labels in valid:
                nn.functional.cross_entropy(model(images), labels)


if __name__ == "__main__":
    main()
