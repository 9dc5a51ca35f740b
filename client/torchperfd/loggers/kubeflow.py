"""A logger that writes progress, remaining time and verdict into the status of a Kubeflow TrainJob.

Kubeflow Trainer from 2.2 on, with its feature gate ``TrainJobStatus``, gives each pod of a TrainJob a URL, a
token and an authority. A status replaces the one before.
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from torchperfd.loggers.outputs import EVERY_SECONDS, FIRST_SECTION
from torchperfd.model.formatting import one_line
from torchperfd.safety.logs import log

if TYPE_CHECKING:
    from torchperfd.model.card import VerdictCard
    from torchperfd.report.rank import RankReport

_URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
_AUTHORITY: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"

# What the TrainJob's schema allows.
_MAX_METRICS: Final = 256
_MAX_CHARACTERS: Final = 64
_MAX_INT: Final = 2**31 - 1

_MIN_SECONDS: Final = 5.0
_TIMEOUT_S: Final = 5.0
_MAX_TOKEN_BYTES: Final = 64 * 1024
_VERDICT: Final = f"{FIRST_SECTION}/verdict"
_STEP: Final = f"{FIRST_SECTION}/step"
_STEP_MS: Final = f"{FIRST_SECTION}/step_ms"


class KubeflowLogger:
    """Writes ``status.trainerStatus`` of the TrainJob that the process belongs to; only rank 0 does.

    It has the numbers, the verdict as the metric ``torchperfd/verdict`` and, with ``total_steps``, progress
    and remaining time. A controller that does not answer costs a line in the log. Transformers has a callback
    of its own for the same field: use one of the two.

    Args:
        total_steps: Training steps that this process is going to make; without them there is no progress.
        every_seconds: How often to write, but at most every five seconds, as Kubeflow asks for.
        every_steps: Also after so many training steps.
    """

    def __init__(
        self,
        total_steps: int = 0,
        *,
        every_seconds: float = EVERY_SECONDS,
        every_steps: int = 0,
    ) -> None:
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self._total_steps = total_steps
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._began: tuple[float, int] | None = None
        self._verdict = ""
        self._metrics: dict[str, str] = {}
        self._step = 0
        self._written_at = -math.inf
        self._fails = False

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the numbers and the progress."""
        self._step = step
        self._metrics = {
            name: f"{value:.6g}"
            for name, value in metrics.items()
            if len(name) <= _MAX_CHARACTERS and math.isfinite(value)
        }
        now = monotonic()
        if self._began is None:
            self._began = now, step
        if now - self._written_at >= _MIN_SECONDS:
            self._written_at = now
            self._write(self._remaining_seconds(now, metrics.get(_STEP_MS)))

    def log_verdict(self, card: "VerdictCard", step: int) -> None:
        """Keep the verdict for the next status."""
        self._verdict = card.heading

    def log_table(self, report: "RankReport") -> None:
        """Write the last status."""
        if self._is_first and not os.environ.get(_URL):
            log.warning("no TrainJob is known (%s is not set), so KubeflowLogger has written nothing", _URL)
        self._step = max(self._step, report.totals.train.steps)
        self._write(0.0 if self._step >= self._total_steps else None)

    def close(self) -> None:
        """Nothing: each status was written at once."""

    def _remaining_seconds(self, now: float, step_ms: float | None) -> float | None:
        """Return the time of the steps that are left, at the pace so far; None if it is unknown."""
        left = self._total_steps - self._step
        began, first = self._began or (now, self._step)
        if self._step > first:
            return max(0, left) * (now - began) / (self._step - first)
        return None if step_ms is None else max(0, left) * step_ms / 1e3

    def _write(self, remaining_seconds: float | None) -> None:
        url = os.environ.get(_URL, "")
        if not url or not self._is_first:
            return
        status = self._status(remaining_seconds)
        try:
            _post(url, json.dumps({"trainerStatus": status}).encode())
            self._fails = False
        except (OSError, ValueError) as error:
            # Raised, it would end the logger after ten of them, and a controller may be away for long.
            if not self._fails:
                log.warning("the status of the TrainJob cannot be written: %s", one_line(str(error), 200))
            self._fails = True

    def _status(self, remaining_seconds: float | None) -> dict[str, Any]:
        metrics = {
            _VERDICT: one_line(self._verdict, _MAX_CHARACTERS),
            _STEP: str(self._step),
            **self._metrics,
        }
        pairs = [{"name": name, "value": value} for name, value in metrics.items() if value]
        status: dict[str, Any] = {
            "metrics": pairs[:_MAX_METRICS],
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if self._total_steps > 0:
            status["progressPercentage"] = min(100, 100 * self._step // self._total_steps)
            if remaining_seconds is not None:
                status["estimatedRemainingSeconds"] = min(_MAX_INT, round(remaining_seconds))
        return status


def _post(url: str, body: bytes) -> None:
    """Post a status, with the token as it is now: the kubelet renews it.

    Raises:
        OSError: The controller does not answer, or a file cannot be read.
        ValueError: It refuses the status, or the environment is invalid.
    """
    # Not every process that has loggers has a TrainJob.
    import http.client
    import ssl
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError(f"{_URL} is no https URL")
    context = ssl.create_default_context(cafile=os.environ.get(_AUTHORITY) or None)
    with Path(os.environ.get(_TOKEN, "")).open(encoding="ascii") as file:
        token = file.read(_MAX_TOKEN_BYTES).strip()
    if not token or not token.isprintable():
        raise ValueError(f"the file of {_TOKEN} has no token")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection = http.client.HTTPSConnection(
        parts.hostname, parts.port or 443, timeout=_TIMEOUT_S, context=context
    )
    try:
        connection.request("POST", parts.path, body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"HTTP {response.status} {response.reason}")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
