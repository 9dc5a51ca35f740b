"""The observer: watches all ranks as they train, and keeps the verdict on each run."""

from torchperfd_daemon.observer.line_sampler import LineSampler
from torchperfd_daemon.observer.observer import Observer, StackProvider

__all__ = ["LineSampler", "Observer", "StackProvider"]
