"""The exporter of a client, and the address of the live page."""

import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import torchperfd
from torchperfd.launch import runner
from torchperfd.launch.runner import parse
from torchperfd.loggers.outputs import Exporter
from torchperfd.safety.logs import Faults
from torchperfd.steps.phases import FORWARD, PhaseNames
from torchperfd.steps.totals import Totals
from torchperfd.v1 import contract, session_pb2

OPTIONAL = (
    "torchperfd_train_samples_total",
    "torchperfd_train_tokens_total",
    "torchperfd_train_model_flops_utilization_ratio",
    "torchperfd_client_overhead_ratio",
)


def scrape(port: int) -> dict[str, float]:
    """Return the value of each sample by its series, as in the exposition."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert (family.type == "counter") != family.name.endswith("_ratio")
        assert family.documentation
        for sample in family.samples:
            order = [name for name in ("run", "rank", "phase") if name in sample.labels]
            labels = ",".join(f"{name}={sample.labels[name]}" for name in order)
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def test_scrape_has_the_current_totals() -> None:
    totals, names = Totals(), PhaseNames()
    augment = names.slot("augment")
    exporter = Exporter(0, run="bert-17", rank=3, names=names, totals=lambda: totals)
    try:
        assert scrape(exporter.port) == {
            "torchperfd_train_steps_total{run=bert-17,rank=3}": 0,
            "torchperfd_train_step_seconds_total{run=bert-17,rank=3}": 0,
        }
        totals.train.steps, totals.train.ns = 2, 3_000_000_000
        totals.train.phases[FORWARD].calls, totals.train.phases[FORWARD].ns = 2, 2_500_000_000
        totals.train.phases[augment].calls, totals.train.phases[augment].ns = 1, 500_000_000
        assert scrape(exporter.port) == {
            "torchperfd_train_steps_total{run=bert-17,rank=3}": 2,
            "torchperfd_train_step_seconds_total{run=bert-17,rank=3}": 3,
            "torchperfd_train_phase_seconds_total{run=bert-17,rank=3,phase=forward}": 2.5,
            "torchperfd_train_phase_seconds_total{run=bert-17,rank=3,phase=augment}": 0.5,
        }
        totals.train.samples, totals.train.tokens = 64, 4096
        totals.flops_per_step, totals.peak_flops, totals.overhead = 3e12, 1e13, 0.0031
        found = scrape(exporter.port)
        assert {name: found[f"{name}{{run=bert-17,rank=3}}"] for name in OPTIONAL} == {
            "torchperfd_train_samples_total": 64,
            "torchperfd_train_tokens_total": 4096,
            "torchperfd_train_model_flops_utilization_ratio": 0.2,
            "torchperfd_client_overhead_ratio": 0.0031,
        }
    finally:
        exporter.close().join()


def test_it_listens_on_loopback_only_and_no_more_once_closed() -> None:
    exporter = Exporter(0, run="r", rank=0, names=PhaseNames(), totals=Totals)
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert [each.ip for each in listening if each.port == exporter.port] == ["127.0.0.1"]
    exporter.close().join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5)


def test_two_exporters_share_nothing() -> None:
    first = Exporter(0, run="a", rank=0, names=PhaseNames(), totals=Totals)
    second = Exporter(0, run="b", rank=0, names=PhaseNames(), totals=Totals)
    try:
        assert all("run=a" in series for series in scrape(first.port))
        assert all("run=b" in series for series in scrape(second.port))
    finally:
        first.close().join()
        second.close().join()


def test_a_client_serves_its_own_steps_until_it_is_detached() -> None:
    client = torchperfd.attach(run="mine", metrics_port=0)
    client.step()
    client.step()
    assert client.parts.outputs.exporter is not None
    port = client.parts.outputs.exporter.port
    assert (
        torchperfd.attach(metrics_port=0).parts.outputs.exporter is client.parts.outputs.exporter
    )  # asked twice, served once
    assert scrape(port)["torchperfd_train_steps_total{run=mine,rank=0}"] == 2
    client.detach()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_that_is_taken_costs_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        client = torchperfd.attach(metrics_port=port)
        assert client.attached
        client.detach()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cannot serve metrics on port {port}: ")
    assert record.getMessage().endswith("choose another metrics_port")


URL = "http://127.0.0.1:9407/metrics"


class Session:
    """As much of a daemon session as names its page."""

    def __init__(self) -> None:
        from torchperfd.parts import DaemonSession

        unused: Any = SimpleNamespace(
            directory=SimpleNamespace(on_welcome=lambda *_: "", path=""),
            greet=lambda: None,
            report_frequently=lambda _: None,
        )
        identity: Any = SimpleNamespace(run="bert", rank=0, local_rank=0)
        self.session = DaemonSession(
            identity,
            unused,
            unused,
            unused,
            unused,
            lambda: 1,
            lambda: (0, ""),
            lambda *_: iter(()),
            Faults(),
        )

    def welcome(self, *features: str) -> None:
        self.session.on_welcome(session_pb2.Welcome(metrics_url=URL, features=features))


def client_of(session: Session, rank: int = 0) -> Any:
    return SimpleNamespace(run="bert", rank=rank, parts=SimpleNamespace(daemon_session=session.session))


def test_address_is_printed_once_when_the_daemon_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    runner.announce_page(client_of(session), quiet=False, open_page=False)
    assert capsys.readouterr().err == ""
    session.welcome(contract.PAGE)
    assert capsys.readouterr().err == "torchperfd: live page at http://127.0.0.1:9407/\n"
    session.welcome(contract.PAGE)
    assert capsys.readouterr().err == ""


def test_address_of_a_daemon_that_was_there_before_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    session.welcome(contract.PAGE)
    runner.announce_page(client_of(session), quiet=False, open_page=False)
    assert "live page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "quiet", "features"), [(1, False, ["page"]), (0, True, ["page"]), (0, False, [])]
)
def test_address_is_not_printed_without_need(
    rank: int, quiet: bool, features: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session()
    runner.announce_page(client_of(session, rank), quiet=quiet, open_page=False)
    session.welcome(*features)
    assert capsys.readouterr().err == ""


def test_page_is_opened_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: started.append(command))
    session = Session()
    session.welcome(contract.PAGE)
    runner.announce_page(client_of(session), quiet=True, open_page=True)
    ((_, *arguments),) = started
    assert arguments == ["-P", "-m", "torchperfd_daemon", "open", "--run", "bert"]


def test_a_failure_to_announce_does_not_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("subprocess.Popen", broken)
    session = Session()
    runner.announce_page(client_of(session), quiet=True, open_page=True)
    session.welcome(contract.PAGE)
    assert session.session.metrics_url == URL


def test_parse_knows_open() -> None:
    options = parse(["--open", "train.py"])
    assert options is not None
    assert options.open_page
