"""Many small parameters, which AdamW updates one after another."""

import torch

torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(200)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
inputs = torch.randn(8, 16)
while True:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
