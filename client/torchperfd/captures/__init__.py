"""Captures: ``torch.profiler`` on demand, agreed between the ranks of a job."""
