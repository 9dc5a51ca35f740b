"""A real object store for tests: moto's S3 server in a process of its own, on loopback."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.node import eventually, free_port

if TYPE_CHECKING:
    from obstore.store import S3Store as ObstoreS3

for package in ("obstore", "moto"):
    if importlib.util.find_spec(package) is None:
        if os.environ.get("CI"):
            raise ImportError(f"CI must have {package}; the extra `test` installs it")
        pytest.skip(f"{package} is not installed here", allow_module_level=True)

BUCKET = "traces"
_PUT = re.compile(rf'"PUT /{BUCKET}/(\S+?)(?:\?\S*)? HTTP/1\.1" 200')


class ObjectStore:
    """S3 on a port that stays the same when it is stopped and started; what it held is then gone.

    Args:
        directory: Where it logs.
    """

    def __init__(self, directory: Path) -> None:
        self._log = directory / "object-store.log"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def start(self, *, bucket: bool = True, **environment: str) -> None:
        """Serve, with an empty bucket unless there shall be none."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}
            )
        eventually(lambda: self._ask("GET", "moto-api/") is not None, 30, self._log.read_text)
        if bucket:
            assert self._ask("PUT", BUCKET) is not None

    def stop(self) -> None:
        """Kill it, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(15)

    def pause(self) -> None:
        """Let it take connections and answer none; only ``stop`` ends that."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def puts(self) -> list[str]:
        """Return the keys that files, or parts of them, were put under, in this order."""
        return _PUT.findall(self._log.read_text())

    def held(self) -> list[str]:
        """Return the keys of what it holds, sorted."""
        return sorted(re.findall("<Key>([^<]+)</Key>", self._ask("GET", f"{BUCKET}?list-type=2") or ""))

    def unfinished(self) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor given up."""
        return re.findall("<Key>([^<]+)</Key>", self._ask("GET", f"{BUCKET}?uploads") or "")

    def content(self, key: str) -> bytes:
        """Return what lies under a key.

        Raises:
            FileNotFoundError: Nothing does.
        """
        import obstore

        return bytes(obstore.get(self._bucket(), key).bytes())

    def put(self, key: str, content: bytes) -> None:
        """Put an object under a key."""
        import obstore

        obstore.put(self._bucket(), key, content, use_multipart=False)

    def delete(self, key: str) -> None:
        """Delete what lies under a key."""
        import obstore

        obstore.delete(self._bucket(), key)

    def _bucket(self) -> "ObstoreS3":
        import obstore.store

        return obstore.store.S3Store(
            BUCKET,
            endpoint=self.environment["AWS_ENDPOINT_URL"],
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True, "pool_max_idle_per_host": "0"},
        )

    def _ask(self, method: str, path: str) -> str | None:
        url = f"http://127.0.0.1:{self._port}/{path}"
        request = urllib.request.Request(url, method=method, data=b"" if method == "PUT" else None)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return str(response.read().decode())
        except OSError:
            return None
