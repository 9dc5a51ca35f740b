"""The rule on DataLoader workers. The client package has it, since ``tune`` and ``bench`` follow it too."""

from torchperfd.loader_workers import CROWDED as CROWDED
from torchperfd.loader_workers import MAX_WORKERS as MAX_WORKERS
from torchperfd.loader_workers import MIN_GAIN as MIN_GAIN
from torchperfd.loader_workers import UNMEASURED_COST as UNMEASURED_COST
from torchperfd.loader_workers import LoaderAdvice as LoaderAdvice
from torchperfd.loader_workers import LoaderFacts as LoaderFacts
from torchperfd.loader_workers import WorkerCost as WorkerCost
from torchperfd.loader_workers import advise_loader as advise_loader
from torchperfd.loader_workers import is_cheap as is_cheap
from torchperfd.loader_workers import making_seconds as making_seconds
from torchperfd.loader_workers import most_computing_workers as most_computing_workers
from torchperfd.loader_workers import step_with as step_with
from torchperfd.settled_advice import SettledAdvice as SettledAdvice
