"""Whether torchperfd is right on a GPU, and what it costs there: one command, one page of results."""
