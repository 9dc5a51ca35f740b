"""What is left when the GPU has no memory left: the snapshot, its summary, and the script's own exception."""

import json
from pathlib import Path
from typing import Final

import torch
from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome

from torchperfd_daemon.memory.snapshot import load
from torchperfd_daemon.memory.summary import summarise
from torchperfd_daemon.memory.sums import place_text

TITLE: Final = "Out of memory"
SECONDS: Final = 60

_BLOCK_BYTES: Final = 1 << 32
_WITHIN: Final = 0.01


def run(machine: Machine) -> Outcome:
    """Allocate until there is no more, and compare what was left with what torch says."""
    outcome = Outcome(["value", "summary of the snapshot", "torch"])
    if machine.is_rehearsal:
        outcome.notes.append("Only a GPU can run out of its memory.")
        return outcome
    with attached(on_oom=True) as client:
        held: list[torch.Tensor] = []
        raised: BaseException | None = None
        try:
            while True:
                held.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            raised = error
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        blocks = len(held)
        held.clear()
        folder = Path(client.parts.daemon_session.captures_dir)
        names = sorted(path.name for path in folder.rglob("*") if path.is_file())
        (pickled,) = folder.rglob("*.memory.pickle")
        found = summarise(load(pickled))
        (manifest,) = folder.rglob("*.manifest.json")
        failed = json.loads(manifest.read_text())["failed_allocation"]
    holder = place_text(found.largest.stack) if found.largest else "nothing"
    rows = (("allocated", found.allocated, allocated), ("reserved", found.reserved, reserved))
    for name, ours, torchs in rows:
        outcome.rows.append([name, f"{ours / 1e9:.3f} GB", f"{torchs / 1e9:.3f} GB"])
        text = f"{name} bytes within {_WITHIN:.0%} of torch's"
        outcome.bounds.append(Bound(text, abs(ours / torchs - 1) <= _WITHIN))
    outcome.rows.append(
        ["failed allocation", f"{failed['wanted'] / 1e9:.3f} GB", f"{_BLOCK_BYTES / 1e9:.3f} GB"]
    )
    outcome.bounds += [
        Bound("the failed allocation's size is in the manifest", failed["wanted"] == _BLOCK_BYTES),
        Bound("the script sees torch's exception", type(raised) is torch.OutOfMemoryError),
        Bound(f"most memory is held by this check's own line: {holder}", Path(__file__).name in holder),
        Bound(f"what is left: {', '.join(names)}", any(name.endswith(".memory.txt") for name in names)),
    ]
    outcome.notes.append(f"After {blocks} tensors of {_BLOCK_BYTES / 1e9:.1f} GB.")
    return outcome
