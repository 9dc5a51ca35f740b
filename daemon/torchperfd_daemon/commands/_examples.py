"""Examples below the help of commands: what one types, and what it gives."""

from collections.abc import Mapping, Sequence
from typing import Final

EXAMPLES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "": (
        ("torchperfd run train.py --epochs 3", "train, and end with what was slow and how to change it"),
        ("torchrun --nproc-per-node 4 -m torchperfd run train.py", "the same with several ranks"),
        ("torchperfd top", "watch a job that runs"),
        ("torchperfd capture", "profile its next five steps"),
    ),
    "serve": (
        ("torchperfd serve", "run the daemon of this node"),
        ("torchperfd serve --demo", "with a simulated job on eight GPUs"),
    ),
    "ps": (("torchperfd ps --watch", "again each second"), ("torchperfd ps --fleet", "runs on all nodes")),
    "top": (("torchperfd top", "all runs; ? shows the keys"), ("torchperfd top --run bert", "one run")),
    "ranks": (
        ("torchperfd ranks", "which rank do the others wait for?"),
        ("torchperfd ranks --last 32 --watch", "over the newest 32 steps, again each second"),
    ),
    "steps": (("torchperfd steps --rank 0 --last 10", "the newest ten steps of rank 0"),),
    "diagnose": (
        ("torchperfd diagnose", "why is it slow now?"),
        ("torchperfd diagnose --json", "the same for a program"),
    ),
    "explain": (
        ("torchperfd explain input-bound", "what it means, how to confirm it, and the fix"),
        ("torchperfd explain", "all causes"),
    ),
    "whatif": (("torchperfd whatif", "what would be gained without each cause?"),),
    "capture": (
        ("torchperfd capture", "the next five steps of the only run"),
        ("torchperfd capture --steps 3 --with-stack", "with the lines of the script"),
        ("torchperfd capture --kind memory", "CUDA memory instead of time"),
    ),
    "captures": (
        ("torchperfd captures list", "what there is"),
        ("torchperfd captures get 20261127 -o traces", "copy one, by a prefix of its id"),
    ),
    "stacks": (("torchperfd stacks", "where does each rank stand, and which one blocks the others?"),),
    "tune": (
        ("torchperfd tune train.py", "which settings make it faster, and by how much?"),
        ("torchperfd tune --only loader train.py", "only those of its DataLoader"),
    ),
    "goodput": (("torchperfd goodput --run bert", "what became of each second, across restarts"),),
    "analyze": (
        ("torchperfd analyze 20261127", "a capture, by a prefix of its id"),
        ("torchperfd analyze rank0.json --html page.html", "a trace, as a page"),
    ),
    "compare": (
        ("torchperfd compare train-3f train-77", "two runs, by a prefix of their ids"),
        ("torchperfd compare 20261127-2210 20261127-2231 --html page.html", "two captures, as a page"),
    ),
    "runs": (
        ("torchperfd runs show train-3f", "its verdict, phases and ranks"),
        ("torchperfd runs show train-3f --html run.html", "the same as a page"),
    ),
    "doctor": (("torchperfd doctor", "what slows this node down, and how to fix it"),),
    "dashboards": (("torchperfd dashboards export grafana", "dashboards and alerts, as files"),),
    "completion": (
        ("torchperfd completion bash > ~/.local/share/bash-completion/completions/torchperfd", "bash"),
        ("torchperfd completion zsh > ~/.zfunc/_torchperfd", "zsh, with ~/.zfunc in fpath"),
        ("torchperfd completion fish > ~/.config/fish/completions/torchperfd.fish", "fish"),
    ),
}


def examples_text(name: str) -> str:
    """Return the examples of a command for the end of its help, as click lays it out; empty without any."""
    found = EXAMPLES.get(name, ())
    if not found:
        return ""
    lines = [line for command, words in found for line in (f"  $ {command}", f"      {words}")]
    return "\b\n" + "\n".join(["Examples:", *lines])
