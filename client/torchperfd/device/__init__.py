"""Device: what an accelerator's streams, memory and arithmetic cost."""
