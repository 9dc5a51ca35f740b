"""What a capture costs the training that it captures, beside the other ways out of torch's profiler."""
