"""Whether ``torchperfd bench dataloader`` finds the best setting, and for how little of a grid's time."""
