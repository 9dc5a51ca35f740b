"""A script whose step is interrupted at each instruction of ours in turn; run by test_interrupts.

Arguments: ``native`` or ``reference`` hooks, at every how many instructions, and ``live`` where the training
thread is to read its events at once, as it does during a capture.
Prints how many exceptions it raised, how many its loop saw, and how far the phases are from their sum.
"""

import sys

if sys.argv[1] == "reference":
    sys.modules["torchperfd.events._native"] = None  # type: ignore[assignment]

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchperfd

PACKAGE = torchperfd.__file__.rpartition("/")[0]
STRIDE = int(sys.argv[2])
IS_LIVE = "live" in sys.argv


class TimeUpError(Exception):
    pass


raised = 0
countdown = 0


def interrupt(frame, event, _argument):  # type: ignore[no-untyped-def]
    """Raise as a signal handler would, at the instruction that is counted down to."""
    global raised, countdown
    if not frame.f_code.co_filename.startswith(PACKAGE):
        return None
    frame.f_trace_opcodes = True
    countdown -= event == "opcode"
    if countdown < 0:
        raised += 1
        raise TimeUpError
    return interrupt


model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
client = torchperfd.attach()
batches = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=2)


def train(epochs: int) -> None:
    for _ in range(epochs):
        for inputs, wanted in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        client.step()


train(3)
if IS_LIVE:
    client.parts.instruments.replay.go_live()
seen = reached = 0
while raised == seen:
    countdown, before = reached, raised
    reached += STRIDE
    sys.settrace(interrupt)
    try:
        train(1)
    except TimeUpError:
        seen += 1
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # torch's own optimizer may have been cut off
    if raised == before:
        break
train(10)
train_account = client.report().totals.train
difference = train_account.ns - sum(phase.ns for phase in train_account.phases)
faults = sum(client.parts.instruments.faults.counts().values())
print(f"raised {raised} seen {seen} difference {difference} faults {faults}")
