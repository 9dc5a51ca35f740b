"""The web configuration: what is taken, what is refused in one line, and how changes come through."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.web_tls import make_certificate

from torchperfd_daemon.web.config_file import WebConfigError, WebConfigFile, load

HASH = "$2b$04$" + "a" * 53
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the configuration; return its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "web.yml"
        path.write_text(text)
        return path

    return to_file


def test_nothing_asked_for_is_plain_and_open(write: Write) -> None:
    config = load(write("{}"))
    assert (config.tls, config.users, config.headers) == (None, {}, {})


def test_headers_are_those_that_exporters_take(write: Write) -> None:
    text = "http_server_config: {http2: false, headers: {X-Frame-Options: deny}}"
    assert load(write(text)).headers == {"X-Frame-Options": "deny"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no mapping"),
        ("[1]", "no mapping"),
        ("1: 2", "no mapping"),
        ('"a\\nb": 2', "a b is not supported"),
        ("a: [", "line 1 is no YAML"),
        ("!!python/object/apply:os.getcwd []", "no YAML"),
        ("tls_config: {}", "tls_config is not supported; use only tls_server_config,"),
        ("tls_server_config: 1", "no mapping"),
        ("tls_server_config: {}", "cert_file is missing"),
        ("tls_server_config: {cert_file: a}", "key_file is missing"),
        ("tls_server_config: {cert_file: a, key_file: b}", "cannot be used"),
        ("tls_server_config: {min_version: TLS10}", "min_version: TLS10 is not supported; use TLS12"),
        ("tls_server_config: {min_version: [TLS12]}", "is not supported"),
        ("tls_server_config: {client_allowed_sans: [a]}", "client_allowed_sans is not supported"),
        ("http_server_config: {headers: {Server: x}}", "Server is not supported"),
        ('http_server_config: {headers: {X-Frame-Options: "a\\r\\nb: c"}}', "no text of one line"),
        ("http_server_config: {headers: {X-Frame-Options: 1}}", "no text of one line"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_fix(write: Write, text: str, said: str) -> None:
    with pytest.raises(WebConfigError) as caught:
        load(write(text))
    assert said in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"cannot read .*: No such file .*--web\.config\.file"):
        load(tmp_path / "none.yml")


@pytest.mark.parametrize("password", ["secret", "'$2b$10$short'", "1", f"'{HASH}é'", "'$1" + HASH[3:] + "'"])
def test_a_password_that_is_no_hash_is_refused(write: Write, password: str) -> None:
    pytest.importorskip("bcrypt")
    with pytest.raises(WebConfigError, match=r"'ada' is no bcrypt hash; make one with `htpasswd"):
        load(write(f"basic_auth_users: {{ada: {password}}}"))


def test_users_have_their_hashes(write: Write) -> None:
    pytest.importorskip("bcrypt")
    assert load(write(f"basic_auth_users: {{ada: {HASH}}}")).users == {"ada": HASH.encode()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.text(alphabet="tlsabcekyfi_r: {}[]\n-&*!|'\"", max_size=60))
def test_any_text_is_taken_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yml"
    path.write_text(text)
    said = ""
    try:
        load(path)
    except WebConfigError as error:
        said = str(error)
    assert "\n" not in said


@pytest.fixture
def tls(tmp_path: Path, write: Write) -> Callable[[str], ssl.SSLContext]:
    """Load a TLS configuration with a certificate; return its context."""
    make_certificate(tmp_path)

    def context(more: str = "") -> ssl.SSLContext:
        config = load(write(f"tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n{more}"))
        assert config.tls
        return config.tls

    return context


@pytest.mark.needs("openssl")
def test_files_are_relative_to_config_and_old_tls_is_refused(
    tls: Callable[[str], ssl.SSLContext],
) -> None:
    context = tls("")
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE


@pytest.mark.needs("openssl")
def test_tls_versions_ciphers_and_client_certs_are_as_set(
    tls: Callable[[str], ssl.SSLContext],
) -> None:
    context = tls(
        "  min_version: TLS12\n  max_version: TLS12\n"
        "  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: server.pem\n"
    )
    assert context.maximum_version is ssl.TLSVersion.TLSv1_2
    assert [cipher["name"] for cipher in context.get_ciphers() if not cipher["name"].startswith("TLS_")] == [
        "ECDHE-RSA-AES128-GCM-SHA256"
    ]
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.needs("openssl")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("  client_auth_type: RequireAnyClientCert\n", "use NoClientCert or VerifyClientCertIfGiven"),
        ("  client_auth_type: RequireAndVerifyClientCert\n", "client_ca_file is missing"),
        ("  client_ca_file: server.pem\n", "asks for no certificate"),
        ("  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: none\n", "none cannot be used"),
        ("  cipher_suites: [RC4]\n", "RC4 is not supported"),
    ],
)
def test_security_that_cannot_be_had_is_refused(
    tls: Callable[[str], ssl.SSLContext], more: str, said: str
) -> None:
    with pytest.raises(WebConfigError) as caught:
        tls(more)
    assert said in str(caught.value)


def test_a_change_is_read_and_a_mistake_is_complained_about_once(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = write("http_server_config: {headers: {X-Frame-Options: deny}}")
    file = WebConfigFile(path, lambda: now[0])
    first = file.current()
    assert file.current() is first, "unchanged files are not read again"
    write("http_server_config: {headers: {X-Frame-Options: sameorigin}}")
    assert file.current().headers == {"X-Frame-Options": "sameorigin"}
    write("")
    for _ in range(3):
        assert file.current().headers == {"X-Frame-Options": "sameorigin"}
        now[0] += 10
    assert sum("stays in force" in record.getMessage() for record in caplog.records) == 1
    write("{} # mended")
    assert file.current().headers == {}


def test_a_change_never_opens_what_was_closed(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("bcrypt")
    file = WebConfigFile(write(f"basic_auth_users: {{ada: {HASH}}}"))
    write("{}")
    assert file.current().users == {"ada": HASH.encode()}
    assert "restart the daemon to serve without passwords" in caplog.text


@pytest.mark.needs("openssl")
def test_change_never_disables_tls(tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    make_certificate(tmp_path)
    file = WebConfigFile(write("tls_server_config: {cert_file: server.pem, key_file: server.key}"))
    write("{}")
    assert file.current().tls is not None
    assert "restart the daemon to turn TLS on or off" in caplog.text
