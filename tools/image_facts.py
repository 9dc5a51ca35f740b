"""Facts of an image, from `buildah inspect --type image` on standard input.

python tools/image_facts.py command                    its entry point and arguments, one a line
python tools/image_facts.py health                     the command of its health check, one word a line
python tools/image_facts.py check VERSION REVISION     nothing, or what is wrong with its labels and user
"""

import json
import sys
from typing import Any

_LABELS = ("title", "description", "licenses", "version", "revision", "base.name")


def problems(config: dict[str, Any], version: str, revision: str) -> list[str]:
    """Return what is wrong with the labels, the user and the port."""
    labels = {name: config["Labels"].get(f"org.opencontainers.image.{name}", "") for name in _LABELS}
    found = [f"label {name} is missing" for name, value in labels.items() if not value]
    if (labels["version"], labels["revision"]) != (version, revision):
        found.append(f"labels are of {labels['version']} {labels['revision']}")
    if config["User"] != "9407:9407":
        found.append(f"its user is {config['User']!r}")
    if list(config["ExposedPorts"]) != ["9407/tcp"]:
        found.append(f"its ports are {config['ExposedPorts']}")
    return found


def main() -> int:
    """Print what the first argument asks for."""
    what, *rest = sys.argv[1:]
    config = json.load(sys.stdin)["Docker"]["config"]
    if what == "command":
        print("\n".join([*config["Entrypoint"], *config["Cmd"]]))
    elif what == "health":
        kind, *words = config["Healthcheck"]["Test"]
        assert kind == "CMD"
        print("\n".join(words))
    else:
        found = problems(config, *rest)
        print("\n".join(found), end="\n" if found else "")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
