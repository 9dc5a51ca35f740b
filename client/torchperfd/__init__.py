"""torchperfd in a training process.

    import torchperfd

    client = torchperfd.attach()        # once, on the thread that trains
    ...                                 # the loop, unchanged
    print(client.report())              # where the time went
    trace = client.capture(steps=5)     # torch.profiler, while training goes on

Importing this package imports neither torch nor grpc; both are loaded when they
are needed, and only if they are.
"""

# Nothing is imported here: `python -m torchperfd` runs this before the current directory is off the path.
# Type checkers take this name for true; importing typing for it would double our cost.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from torchperfd._version import __version__
    from torchperfd.attachment import attach
    from torchperfd.captures.job_capture import JobCapture
    from torchperfd.captures.manager import Capture
    from torchperfd.client import Client
    from torchperfd.errors import CaptureError, CaptureTimeoutError, TorchperfdError

__all__ = [
    "Capture",
    "CaptureError",
    "CaptureTimeoutError",
    "Client",
    "JobCapture",
    "TorchperfdError",
    "__version__",
    "attach",
]

_HOMES = {
    "__version__": "_version",
    "Capture": "captures.manager",
    "Client": "client",
    "JobCapture": "captures.job_capture",
    "attach": "attachment",
    "CaptureError": "errors",
    "CaptureTimeoutError": "errors",
    "TorchperfdError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"torchperfd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
