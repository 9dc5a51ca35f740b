"""A Prometheus of one's own, or what keeps its series for long."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.support.node import free_port


class Queried:
    """What answers PromQL on a port of its own: Prometheus, or what keeps its series for long."""

    def __init__(self, log: Path, port: int, *command: str) -> None:
        self.port = port
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(15)

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the result of an instant query, now or at a moment of Unix seconds.

        Raises:
            AssertionError: The query is rejected; the message is the server's own.
        """
        asked = {"query": expression} | ({"time": f"{at:.3f}"} if at is not None else {})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode(asked)
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                document = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                    return []  # still starting
                raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:
            return []
        assert document["status"] == "success"
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the one value of an instant query, None when there is none."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if result else None


def start_prometheus(
    directory: Path, targets: Mapping[str, int], rules: Path | None = None, remote_write: str = ""
) -> Queried:
    """Start a Prometheus that scrapes ports of this machine twice a second.

    Args:
        targets: Ports by the name of the scrape job.
        rules: Rules that it evaluates once a second.
        remote_write: A section of its configuration, such as docs/fleet.md shows; empty for none.
    """
    config = directory / "prometheus.yml"
    jobs = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
        for job, port in targets.items()
    )
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"
        f"rule_files: {[str(rules)] if rules else []}\n"
        f"scrape_configs:\n{jobs}{remote_write}"
    )
    return start_configured(directory, config, free_port())


def start_configured(directory: Path, config: Path, port: int) -> Queried:
    """Start a Prometheus with a configuration of its own."""
    return Queried(
        directory / "prometheus.log",
        port,
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
