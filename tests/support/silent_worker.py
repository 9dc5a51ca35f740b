"""A process for tests of ``WorkerProcess``: it answers, is silent, ends, or has a child."""

import json
import os
import subprocess
import sys
import time


def main() -> None:
    """Behave as the first argument says: ``answers``, ``silent``, ``ends`` or ``leaves a child``."""
    behaviour, requests, answers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if behaviour == "ends":
        return
    if behaviour == "leaves a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.write(answers, (json.dumps({"child": child.pid}) + "\n").encode())
    if behaviour == "answers":
        with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
            for line in lines:
                text = json.dumps({"asked": json.loads(line)})
                # In two parts, as a long answer comes.
                out.write(text[:5])
                out.flush()
                out.write(text[5:] + "\n")
                out.flush()
    time.sleep(600)
