"""The status of a TrainJob, posted over TLS to a server that stands in for Kubeflow Trainer's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.web_tls import make_certificate
from tests.support.clock import Clock
from tests.support.scripted_server import Reply, ScriptedServer

import torchperfd
from torchperfd.loggers import KubeflowLogger
from torchperfd.model.card import CauseCard, VerdictCard

pytestmark = pytest.mark.needs("openssl")
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/bert/status"


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A status server, and the environment that Kubeflow gives to the pods of a TrainJob."""
    certificate = make_certificate(tmp_path)
    (tmp_path / "token").write_text("first\n")
    with ScriptedServer(certificate=certificate) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url + PATH)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate[0]))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        yield server


def statuses(server: ScriptedServer) -> list[dict[str, Any]]:
    """Return the statuses so far, each within the limits of Kubeflow's schema for ``trainerStatus``."""
    found = []
    for request in server.received:
        document = json.loads(request.body)
        assert list(document) == ["trainerStatus"]
        status = document["trainerStatus"]
        assert status["lastUpdatedTime"].endswith("Z")
        assert 0 <= status.get("progressPercentage", 0) <= 100
        assert 0 <= status.get("estimatedRemainingSeconds", 0) < 2**31
        assert len(status["metrics"]) <= 256
        for metric in status["metrics"]:
            assert metric.keys() == {"name", "value"}
            assert all(1 <= len(text) <= 64 for text in metric.values())
        found.append(status)
    return found


def metrics_of(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The logger's clock."""
    clock = Clock()
    monkeypatch.setattr("torchperfd.loggers.kubeflow.monotonic", clock)
    return clock


def card(*, is_healthy: bool = False) -> VerdictCard:
    cause = CauseCard("input-bound", "", "workers starve", "num_workers=8", 0.05, 0.1, 0.0, 0.0, None)
    return VerdictCard("bert", () if is_healthy else (cause,), "", is_healthy, "")


def test_kubeflow_status_comes_from_a_real_loop(trainer: ScriptedServer) -> None:
    client = torchperfd.attach(loggers=[KubeflowLogger(8)])
    for _ in range(4):
        client.step(samples=8)
    client.detach()
    assert client.parts.instruments.faults.counts() == {}
    (request, *_), status = trainer.received, statuses(trainer)[-1]
    assert request.path == PATH
    assert request.headers["authorization"] == "Bearer first"
    assert request.headers["content-type"] == "application/json"
    assert status["progressPercentage"] == 50
    assert {"torchperfd/step_ms", "torchperfd/samples_per_second"} <= metrics_of(status).keys()
    assert metrics_of(status)["torchperfd/step"] == "4"


def test_kubeflow_remaining_time_follows_the_pace(trainer: ScriptedServer, clock: Clock) -> None:
    """At first that of a step, then all that passes between the steps as well."""
    logger = KubeflowLogger(1000)
    logger.log_metrics({"torchperfd/step_ms": 100.0}, 100)
    clock.now += 30
    logger.log_metrics({"torchperfd/step_ms": 100.0}, 250)
    shown = [(each["progressPercentage"], each["estimatedRemainingSeconds"]) for each in statuses(trainer)]
    assert shown == [(10, 90), (25, 150)]


def test_kubeflow_status_without_total_has_no_progress(trainer: ScriptedServer) -> None:
    logger = KubeflowLogger()
    logger.log_metrics({"torchperfd/step_ms": 100.0, "x" * 65: 1.0, "bad": float("nan")}, 7)
    (status,) = statuses(trainer)
    assert status.keys() == {"metrics", "lastUpdatedTime"}
    assert metrics_of(status) == {"torchperfd/step": "7", "torchperfd/step_ms": "100"}


def test_kubeflow_status_beyond_the_total_is_complete(trainer: ScriptedServer) -> None:
    logger = KubeflowLogger(10)
    logger.log_metrics({"torchperfd/step_ms": 1e12}, 12)
    (status,) = statuses(trainer)
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)


def test_kubeflow_status_has_the_verdict(trainer: ScriptedServer, clock: Clock) -> None:
    logger = KubeflowLogger()
    logger.log_verdict(card(), 5)
    logger.log_metrics({}, 10)
    logger.log_verdict(card(is_healthy=True), 10)
    clock.now += 5
    logger.log_metrics({}, 20)
    first, second = (metrics_of(status)["torchperfd/verdict"] for status in statuses(trainer))
    assert first == "input-bound · 50% of the step"
    assert second == "healthy"


def test_kubeflow_writes_at_most_every_five_seconds(trainer: ScriptedServer, clock: Clock) -> None:
    logger = KubeflowLogger(every_seconds=0.1)
    for step in range(11):
        logger.log_metrics({}, step)
        clock.now += 1
    assert [metrics_of(status)["torchperfd/step"] for status in statuses(trainer)] == ["0", "5", "10"]


def test_kubeflow_token_is_read_anew(trainer: ScriptedServer, tmp_path: Path, clock: Clock) -> None:
    logger = KubeflowLogger()
    logger.log_metrics({}, 1)
    (tmp_path / "token").write_text("second")
    clock.now += 5
    logger.log_metrics({}, 2)
    assert [each.headers["authorization"] for each in trainer.received] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("reply", [Reply(403), Reply(302, headers={"Location": "https://127.0.0.1:1/"})])
def test_kubeflow_refusal_is_logged_once(
    trainer: ScriptedServer, reply: Reply, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.replies = [reply]
    logger = KubeflowLogger()
    for step in range(12):
        logger.log_metrics({}, step)
        clock.now += 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(trainer.received) == 12, "and it goes on: the controller may be restarted"
    assert "first" not in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1/status"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1/status"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "/nowhere"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", ""),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", "/nowhere"),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", ""),
    ],
)
def test_kubeflow_broken_environment_sends_nothing(
    trainer: ScriptedServer,
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, value)
    KubeflowLogger().log_metrics({}, 1)
    assert trainer.received == []
    assert len(caplog.records) == 1


def test_kubeflow_damaged_token_is_not_shown(
    trainer: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("s3cr3t\nX-Header: 1")
    KubeflowLogger().log_metrics({}, 1)
    assert trainer.received == []
    assert "s3cr3t" not in caplog.text


def test_kubeflow_is_for_rank_0(trainer: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    KubeflowLogger(10).log_metrics({}, 1)
    assert trainer.received == []


def test_kubeflow_without_a_trainjob_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = torchperfd.attach(loggers=[KubeflowLogger()])
    client.step()
    client.detach()
    assert "no TrainJob is known" in caplog.text
