"""More threads than CPUs, on products that are small."""

import torch

torch.manual_seed(1)
torch.set_num_threads(16)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
inputs = torch.randn(128, 256)
while True:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
