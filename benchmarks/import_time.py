"""What ``import torchperfd`` adds to Python's start, and ``attach()`` to a script that has imported torch.

    python benchmarks/import_time.py

The first is interleaved A/B, in medians with spread. The second is the CPU time of the process until
``attach()`` returns, without a daemon: with modules that were compiled before, and as they are installed,
which in a fresh clone under ``PYTHONDONTWRITEBYTECODE`` means compiling them all. About 85 ms of it are a
full collection of garbage, which the objects of ``import torch`` have made due.

Exits 1 when the import's median difference is 20 ms or more, when torch or grpc gets imported, when
``attach()`` takes more than 120 ms either way, or imports more than 120 modules of ours.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Final

ALTERNATIONS: Final = 40
LIMIT_MS: Final = 20.0
ATTACH_ROUNDS: Final = 7
MAX_ATTACH_MS: Final = 120.0
MAX_MODULES: Final = 120
_ATTACH: Final = """
import sys, time
import torch, torch.utils.data
began = time.process_time()
import torchperfd
client = torchperfd.attach()
print(time.process_time() - began, sum(name.partition(".")[0] == "torchperfd" for name in sys.modules))
client.detach()
"""


def start_ms(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


def attach_cost(*, compiled: bool) -> tuple[float, int]:
    """Return the median CPU time of ``attach()`` in ms, and how many modules of ours it imports."""
    costs = []
    with tempfile.TemporaryDirectory() as directory:
        private = {"XDG_RUNTIME_DIR": directory, "PYTHONPYCACHEPREFIX": f"{directory}/compiled"}
        environment = {**os.environ, **private, "PYTHONDONTWRITEBYTECODE": "" if compiled else "1"}
        if compiled:
            subprocess.run([sys.executable, "-c", _ATTACH], check=True, env=environment, capture_output=True)
        else:
            # torch's own modules stay compiled, where it has compiled them.
            del environment["PYTHONPYCACHEPREFIX"]
        for _ in range(ATTACH_ROUNDS):
            done = subprocess.run(
                [sys.executable, "-c", _ATTACH], check=True, env=environment, capture_output=True, text=True
            )
            seconds, modules = done.stdout.split()
            costs.append(float(seconds) * 1e3)
    return statistics.median(costs), int(modules)


def main() -> int:
    bare, ours, attach_side = [], [], []
    for _ in range(ALTERNATIONS):
        bare.append(start_ms("pass"))
        ours.append(start_ms("import torchperfd"))
        attach_side.append(start_ms("import torchperfd.client"))
    print(f"{'start of Python with':<28} {'median':>9} {'p10':>9} {'p90':>9}")
    for name, times in (
        ("nothing", bare),
        ("import torchperfd", ours),
        ("import torchperfd.client", attach_side),
    ):
        deciles = statistics.quantiles(times, n=10)
        print(f"{name:<28} {statistics.median(times):>6.1f} ms {deciles[0]:>6.1f} ms {deciles[8]:>6.1f} ms")
    added = statistics.median(ours) - statistics.median(bare)
    heavy = subprocess.run(
        [sys.executable, "-c", "import sys, torchperfd; print(*({'torch', 'grpc'} & set(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    print(f"import torchperfd adds {added:.2f} ms, limit {LIMIT_MS:.0f} ms")
    print(f"heavy imports: {heavy or 'none'}")
    wrong = added >= LIMIT_MS or bool(heavy)
    for name, compiled in (("modules compiled before", True), ("modules as installed", False)):
        cost, modules = attach_cost(compiled=compiled)
        print(
            f"attach, {name}: {cost:.0f} ms of CPU, limit {MAX_ATTACH_MS:.0f} ms; {modules} modules of ours"
        )
        wrong = wrong or cost > MAX_ATTACH_MS or modules > MAX_MODULES
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
