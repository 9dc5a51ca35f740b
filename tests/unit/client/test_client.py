"""The client that a script holds, and the framework whose loop it runs in."""

import functools
import re
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from tests.support.torches import needs_flops
from tests.unit.client.training import loader, open_phases, tiny_model, train
from torch import nn

import torchperfd
from torchperfd.hooks.thread_frames import framework_around
from torchperfd.report.rank import RankReport


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("torchperfd")}


def test_attach_takes_names_from_call_and_rank_from_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    client = torchperfd.attach(run="bert-17", job="bert")
    assert (client.run, client.rank, client.parts.identity.job_name) == ("bert-17", 3, "bert")
    assert client.attached
    assert not client.connected
    assert client.parts.daemon_session.metrics_url == ""


def test_captures_dir_is_the_environments_until_a_daemon_sets_it(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    assert client.parts.daemon_session.captures_dir == f"{tmp_path}/captures"


def test_it_has_two_threads_while_attached_and_none_after() -> None:
    client = torchperfd.attach()
    assert threads() == {"torchperfd-flusher", "torchperfd-stream"}
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in threads())
    client.detach()
    assert threads() == set()


def test_the_report_is_of_all_steps_up_to_now(client: torchperfd.Client) -> None:
    for expected in (1, 2, 3):
        client.step()
        report = client.report()
        assert isinstance(report, RankReport)
        assert report.totals.train.steps == expected
    assert [report.table.steps, report.table.rows[1].calls] == [3, 2]
    assert str(report).startswith("rank 0 · train · 3 steps")


def test_the_report_is_still_there_after_detaching(client: torchperfd.Client) -> None:
    client.step()
    client.detach()
    client.step()
    assert client.report().totals.train.steps == 1


def test_a_bad_phase_name_is_the_callers_error(client: torchperfd.Client) -> None:
    with pytest.raises(ValueError, match="1 to 64 printable characters"):
        client.phase("")


def test_phases_of_the_same_name_are_one_phase_and_may_be_kept(client: torchperfd.Client) -> None:
    kept = client.phase("augment")
    for _ in range(2):
        with kept:
            pass
        with client.phase("augment"):
            pass
    client.step()
    assert client.report().to_dict()["train"]["phases"]["augment"]["calls"] == 4


def test_a_phase_ends_when_its_block_raises(client: torchperfd.Client) -> None:
    with pytest.raises(KeyError), client.phase("augment"):
        raise KeyError
    assert open_phases(client) == 0


def test_the_seventeenth_phase_is_other(client: torchperfd.Client) -> None:
    for number in range(20):
        with client.phase(f"mine {number}"):
            pass
    client.step()
    phases = client.report().to_dict()["train"]["phases"]
    assert set(phases) == {f"mine {number}" for number in range(16)} | {"other"}


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_a_capture_of_an_impossible_length_is_the_callers_error(
    client: torchperfd.Client, steps: int
) -> None:
    with pytest.raises(ValueError, match="steps must be 1 to 1000"):
        client.capture(steps=steps)


def test_a_detached_client_captures_nothing() -> None:
    client = torchperfd.attach()
    client.detach()
    with pytest.raises(torchperfd.CaptureError, match=r"detached; call torchperfd.attach\(\) first"):
        client.capture()


def test_detaching_twice_and_finishing_after_it_are_nothing() -> None:
    client = torchperfd.attach()
    client.finish()
    client.finish()
    client.detach()
    client.detach()
    client.finish()
    assert not client.attached


@needs_flops
def test_a_later_attach_takes_its_options_over(caplog: pytest.LogCaptureFixture) -> None:
    """Under ``torchperfd run`` the script's own attach is the second one."""
    client = torchperfd.attach()
    with caplog.at_level("INFO", "torchperfd"):
        assert torchperfd.attach(max_overhead=0.02, flops=True, peak_flops=1e12, run="mine") is client
    assert client.parts.instruments.replay.overhead.limit == 0.02
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    client.finish()
    assert client.parts.instruments.accelerator.flops() == (2 * 4 * 2 * 2, 1e12)
    assert "attach(run='mine') comes too late" in caplog.text
    client.detach()


def test_training_without_an_optimizer_has_advice() -> None:
    client = torchperfd.attach()
    weight = torch.ones(2, requires_grad=True)
    for _ in range(3):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    client.finish()
    assert client.advice.startswith("3 backward passes were seen, but no optimizer of torch's")
    assert "client.step()" in client.advice
    client.detach()


def test_a_process_that_trains_nothing_has_advice() -> None:
    client = torchperfd.attach()
    client.finish()
    assert "torchrun" in client.advice
    client.detach()


def test_a_process_that_trains_has_no_advice() -> None:
    client = torchperfd.attach()
    client.step()
    client.finish()
    assert client.advice == ""
    client.detach()


def test_verdict_without_a_daemon_is_not_known() -> None:
    client = torchperfd.attach()
    try:
        card = client.verdict(timeout=0.1)
    finally:
        client.detach()
    assert (card.causes, card.is_healthy) == ((), False)
    assert "no daemon has answered" in card.to_html()


def test_client_shows_its_run_and_state() -> None:
    client = torchperfd.attach(run="bert-17")
    try:
        assert repr(client) == "<torchperfd client of run bert-17, rank 0, without a daemon>"
    finally:
        client.detach()
    assert repr(client).endswith("detached>")


def test_verdict_without_a_daemon_names_the_largest_phase() -> None:
    client = torchperfd.attach()
    try:
        for _ in range(3):
            with client.phase("augment"):
                sum(range(20_000))
            client.step()
        card = client.verdict(timeout=0.1)
        assert repr(client.report()) == client.report().to_text()
    finally:
        client.detach()
    assert re.fullmatch(r"no daemon has answered; augment takes \d+% of the step", card.remark)


def within(module: str, inner: Callable[[], Any]) -> Any:
    """Call ``inner`` from a function that a module of this name would have."""
    called = FunctionType(_template.__code__, {"__name__": module, "inner": inner})
    return called()


def _template() -> Any:
    return inner()  # type: ignore[name-defined]  # noqa: F821 - from the globals it is given


def asked() -> str:
    return framework_around(threading.get_ident())


@pytest.mark.parametrize(
    ("modules", "framework"),
    [
        (["__main__"], ""),
        (["lightning.pytorch.loops.fit_loop"], "lightning"),
        (["pytorch_lightning.trainer.trainer", "my_model"], "lightning"),
        (["my_script", "transformers.trainer", "accelerate.data_loader"], "transformers"),
        (["fastai.learner", "ignite.engine.engine"], "fastai"),
        (["lightningly", "accelerate.accelerator", "torch.nn.modules"], ""),
    ],
)
def test_the_outermost_loop_counts(modules: list[str], framework: str) -> None:
    call = asked
    for module in reversed(modules):
        call = functools.partial(within, module, call)
    assert call() == framework


def test_a_thread_that_is_gone_is_in_no_loop() -> None:
    assert framework_around(0) == ""


def test_framework_is_sent_with_the_state(client: torchperfd.Client) -> None:
    client.parts.flusher.stop(5)
    client.parts.outbox.take(0, 100)
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    within("transformers.trainer", client.parts.flusher.flush)
    [message] = client.parts.outbox.take(0, 100)
    assert message.state.framework == "transformers"
