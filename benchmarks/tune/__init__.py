"""Whether `torchperfd tune` is right: six small scripts, tuned, edited and measured for longer."""
