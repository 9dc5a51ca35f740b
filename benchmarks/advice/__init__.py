"""Whether the advice is right: slow scripts, what was predicted for each, and what the change then saved."""
