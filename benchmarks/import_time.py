"""What ``import torchperfd`` adds to Python's start: interleaved A/B, medians with spread.

    python benchmarks/import_time.py

Exits 1 when the median difference is 20 ms or more, or when torch or grpc gets imported.
"""

import statistics
import subprocess
import sys
import time
from typing import Final

ALTERNATIONS: Final = 40
LIMIT_MS: Final = 20.0


def start_ms(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


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
    return 1 if added >= LIMIT_MS or heavy else 0


if __name__ == "__main__":
    sys.exit(main())
