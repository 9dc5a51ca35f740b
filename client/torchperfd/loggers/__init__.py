"""Send what torchperfd measures to an experiment tracker or a TrainJob, while training goes on.

    from torchperfd.loggers import WandbLogger

    client = torchperfd.attach(loggers=[WandbLogger()])

Each logger runs on a thread of its own, so that one which is slow, hangs or raises costs
only itself. No tracker's library is imported before there is something to log.
Your own logger is any object with the three methods of :class:`Logger`.
"""

from torchperfd.loggers.kubeflow import KubeflowLogger
from torchperfd.loggers.outputs import Logger
from torchperfd.loggers.trackers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["KubeflowLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
