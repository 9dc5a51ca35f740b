"""Writes the dashboards that are committed next to this file.

Run `python -m grafana.build` in the root of the repository after an edit; `--check` changes nothing and
fails when a committed file is stale.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana.run import run_dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

OUTPUT: Final = Path(__file__).parent / "dashboards"
DASHBOARDS: Final[dict[str, Callable[[], Dashboard]]] = {"run.json": run_dashboard}


def render(dashboard: Dashboard) -> str:
    """Turn a dashboard into the text of its file: the same text for the same dashboard, always."""
    return json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    """Write every dashboard, or compare each with its file."""
    parser = argparse.ArgumentParser(prog="python -m grafana.build", description="Write the dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    check = parser.parse_args().check
    stale = []
    for name, make in DASHBOARDS.items():
        path, text = OUTPUT / name, render(make())
        if check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    for name in stale:
        print(f"{name} is stale: run `python -m grafana.build`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
