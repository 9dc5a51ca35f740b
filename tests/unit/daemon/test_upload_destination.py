"""Where captures may be uploaded to, and the note of that place."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.captures.destination import (
    Destination,
    read_upload_marker,
    remove_upload_marker,
    write_upload_marker,
)
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.object_store import cause


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/prefix", "is no URL of an object store"),
        ("http://bucket/x", "is no URL of an object store"),
        ("s3:///x", "names no bucket or directory"),
        ("s3://bucket/a/../b", "names no bucket or directory"),
        ("file:///", "names no bucket or directory"),
        ("file://server/share", "names no bucket or directory"),
        ("s3://key:secret@bucket/x", "has more than a bucket and a prefix"),
        ("az://container/x?sig=secret", "has more than a bucket and a prefix"),
        ("s3://[::1", "is no URL"),
    ],
)
def test_a_place_that_is_none_is_a_usage_error(url: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        Destination(url)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


@given(st.text(max_size=60) | st.from_regex(r"(s3|gs|az|file)://[^ ]{0,40}", fullmatch=True))
def test_no_url_is_a_traceback(url: str) -> None:
    try:
        said = Destination(url, {}).url
    except UsageError as error:
        said = str(error)
    assert said.isprintable()


def test_gcs_and_azure_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert Destination("gs://bucket/prefix").url == "gs://bucket/prefix"
    assert Destination("az://container/prefix/").url == "az://container/prefix"


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:9000",
        "http://10.1.2.3",
        "http://minio:9000",
        "http://minio.ml.svc.cluster.local:9000",
    ],
)
def test_plain_http_is_for_private_endpoints(endpoint: str) -> None:
    assert Destination("s3://bucket", {"AWS_ENDPOINT_URL": endpoint}).url == "s3://bucket"


def test_plain_http_across_the_internet_has_to_be_asked_for() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://s3.example.com"}
    with pytest.raises(UsageError, match=r"traces would go to s3\.example\.com unencrypted"):
        Destination("s3://bucket", environment)
    assert Destination("s3://bucket", {**environment, "AWS_ALLOW_HTTP": "true"}).url == "s3://bucket"


def test_captures_are_not_uploaded_to_where_they_are(tmp_path: Path) -> None:
    for inside in (tmp_path, tmp_path / "x" / "y"):
        with pytest.raises(UsageError, match="is in the captures directory"):
            Destination(inside.as_uri()).check_apart(tmp_path)
    Destination((tmp_path / "other").as_uri()).check_apart(tmp_path / "captures")
    Destination("s3://bucket").check_apart(tmp_path)


def test_without_obstore_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(TorchperfdError, match=r"needs obstore; `pip install obstore`"):
        Destination("s3://bucket")


@given(st.text())
def test_a_cause_is_one_short_line(text: str) -> None:
    words = cause(ValueError(text))
    assert len(words) <= 200
    assert words.isprintable()


def test_a_note_of_the_place_is_no_link(tmp_path: Path) -> None:
    directory = tmp_path / "captures"
    write_upload_marker(directory, "s3://bucket/x")
    assert read_upload_marker(directory) == "s3://bucket/x"
    write_upload_marker(directory, "s3://bucket/y")
    assert read_upload_marker(directory) == "s3://bucket/y"
    secret = tmp_path / "secret"
    secret.write_text("s3://secret")
    (directory / ".uploads-to").unlink()
    (directory / ".uploads-to").symlink_to(secret)
    assert read_upload_marker(directory) == ""
    remove_upload_marker(directory)
    remove_upload_marker(directory)
    assert secret.read_text() == "s3://secret"
    assert read_upload_marker(directory) == ""
