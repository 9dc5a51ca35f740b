"""Large parameters, whose gradients are filled with zeros and then added to."""

import torch

torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
inputs = torch.randn(2, 1500)
while True:
    optimizer.zero_grad(set_to_none=False)
    model(inputs).square().mean().backward()
    optimizer.step()
