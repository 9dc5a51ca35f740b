"""The configuration: who says what is in force, and what is said of a file that makes no sense."""

import contextlib
import dataclasses
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.commands import Run
from tests.support.golden import check_golden
from tests.support.node import ROOT

from torchperfd_daemon.config.effective import (
    ConfigFile,
    as_tables,
    find_files,
    read_file,
    read_plan,
    resolve,
)
from torchperfd_daemon.config.options import OPTIONS, Option, ServeSettings
from torchperfd_daemon.errors import BadValueError, ConfigError
from torchperfd_daemon.triggers.plan import Plan, Rule, Schedule, When

BY_KEY = {option.key: option for option in OPTIONS}

EXAMPLE = """
captures_dir = "/var/lib/torchperfd/captures"
captures_max_bytes = "50GB"
captures_max_age = "30d"
interval = 2

[triggers]
per_day = 20

[[trigger]]
when = "stall"

[[trigger]]
name = "loader-starves"
when = "metric"
metric = "torchperfd_train_dataloader_ready_batches"
labels = { rank = "0" }
below = 1
for = "30s"
steps = 3
with_stack = true
cooldown = "2h"

[[trigger]]
every = "10m"
"""


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command on a machine with no configuration of its own."""
    for name in {option.variable for option in OPTIONS} | {"TORCHPERFD_CONFIG"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/ada/.local/state")
    monkeypatch.setattr(find_files, "__defaults__", (tmp_path / "system.toml",))
    return run


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_empty_file_gives_default_settings(tmp_path: Path) -> None:
    resolved = resolve({}, [read_file(write(tmp_path / "a.toml", ""))], {}).serve_settings()
    assert resolved == ServeSettings(socket=resolved.socket, captures_dir=resolved.captures_dir)
    assert resolve({}, [], {}).plan == Plan()


def test_every_setting_that_people_may_choose_has_an_option() -> None:
    fields = {field for option in OPTIONS for field in (option.fields or (option.key,))}
    assert fields == {field.name for field in dataclasses.fields(ServeSettings)} - {
        "drain_seconds",
        "grace_seconds",
    }


def test_every_flag_is_in_the_help(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    for option in OPTIONS:
        assert (option.name in out) is not option.flag_only, option.name


SOURCES = ("flag", "variable", "chosen", "system")
CHOICES: dict[str, list[tuple[str, Any]]] = {
    # What a file has, and the same as text.
    "interval": [("1.5", 1.5), ("2.0", 2.0), ("3.25", 3.25), ("4.0", 4.0)],
    "captures_max_count": [("1", 1), ("20", 20), ("300", 300), ("0", 0)],
    "captures_max_bytes": [("1GiB", "1GiB"), ("5MB", "5MB"), ("0", 0), ("7kB", "7kB")],
    "metrics_address": [(f"h{n}:80", f"h{n}:80") for n in range(4)],
    "demo": [("1", True), ("0", False), ("yes", True), ("off", False)],
    "log_level": [(word, word) for word in ("debug", "info", "warning", "error")],
}


@given(
    st.dictionaries(
        st.sampled_from(sorted(CHOICES)),
        st.dictionaries(st.sampled_from(SOURCES), st.integers(0, 3), min_size=1),
    )
)
def test_the_strongest_source_wins(said: dict[str, dict[str, int]]) -> None:
    flags: dict[str, Any] = {}
    environ: dict[str, str] = {}
    chosen: dict[str, Any] = {}
    system: dict[str, Any] = {}
    for key, sources in said.items():
        option = BY_KEY[key]
        for source, which in sources.items():
            text, raw = CHOICES[key][which]
            if source == "flag":
                flags[key] = option.kind.parse(text, Path())
            elif source == "variable":
                environ[option.variable] = text
            else:
                (chosen if source == "chosen" else system)[key] = option.kind.read(raw, Path())
    files = [ConfigFile(Path("c.toml"), chosen, None), ConfigFile(Path("s.toml"), system, None)]
    resolved = resolve(flags, files, environ).settings
    origins = {"variable": lambda o: o.variable, "chosen": lambda _: "c.toml", "system": lambda _: "s.toml"}
    for option in OPTIONS:
        sources = said.get(option.key, {})
        strongest = next((source for source in SOURCES if source in sources), None)
        if strongest is None:
            assert resolved[option.key].origin == "default"
            continue
        text, _ = CHOICES[option.key][sources[strongest]]
        assert resolved[option.key].value == option.kind.parse(text, Path())
        named: Callable[[Option], str] = origins.get(strongest, lambda o: o.name)
        assert resolved[option.key].origin == named(option)


def test_triggers_are_those_of_the_first_file_that_has_some(tmp_path: Path) -> None:
    chosen = write(tmp_path / "c.toml", "interval = 2\n")
    system = write(tmp_path / "s.toml", '[[trigger]]\nwhen = "stall"\n')
    found = resolve({}, find_files(chosen, system), {})
    assert ([rule.name for rule in found.plan.rules], found.plan_origin) == (["stall"], str(system))
    write(chosen, "[triggers]\nper_day = 3\n")
    found = resolve({}, find_files(chosen, system), {})
    assert (found.plan, found.plan_origin) == (Plan(per_day=3), str(chosen))
    assert find_files(None, tmp_path / "none.toml") == []


def test_an_empty_variable_is_none_and_a_wrong_one_is_named() -> None:
    assert resolve({}, [], {"TORCHPERFD_INTERVAL": ""}).settings["interval"].value == 1.0
    assert resolve({}, [], {"TORCHPERFD_EMBEDDED": "1"}).settings["embedded"].value is False
    with pytest.raises(ConfigError) as error:
        resolve({}, [], {"TORCHPERFD_INTERVAL": "soon"})
    assert str(error.value) == "TORCHPERFD_INTERVAL: 'soon' is not a time in seconds; write it in digits"


def test_paths_in_a_file_start_from_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'captures_dir = "kept"\nweb_config_file = "/etc/web.yml"\n')
    resolved = resolve({}, [read_file(file)], {}).serve_settings()
    assert (resolved.captures_dir, resolved.web_config_file) == (tmp_path / "kept", Path("/etc/web.yml"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("captures-max-bytes = 5", "there is no key 'captures-max-bytes'; did you mean captures_max_bytes?"),
        ("embedded = true", "there is no key 'embedded'; known are socket, "),
        ('interval = "2"', "interval: '2' is not a time in seconds; write it like 0.05"),
        ("demo = 1", "demo: 1 is neither true nor false; write true or false"),
        ("socket_mode = 600", 'socket_mode: 600 is no file mode; write it like "600" or "666"'),
        ("interval = [", "is not TOML: "),
        ('log_level = "info', r"is not TOML: Unterminated string (at end of document); correct it"),
        (b"\xff\xfe", "is not TOML: "),
        ("x = " + "[" * 5000, "is not TOML: "),
        ("interval = " + "9" * 5000, "is not TOML: "),
        ("interval = 0x" + "f" * 5000, "interval: so large a number is out of range; choose 0.05 to 3600"),
        ("#" * 2**20 + "\n", "has more than 1,048,576 bytes; name a TOML file with --config"),
        ("trigger = 3", "trigger is no list of tables; write each as [[trigger]]"),
        ("triggers = 3", "triggers is no table; write it as [triggers]"),
        ("[triggers]\nperday = 3", "triggers: there is no key 'perday'; did you mean per_day?"),
        ("[[trigger]]", 'trigger 1: neither when nor every is set; write when = "stall", or every = "10m"'),
        ('[[trigger]]\nwhen = "stal"', "trigger 1: when: 'stal' is none of the choices; did you mean stall?"),
        ('[[trigger]]\nwhen = "stall"\nsteps = 3', "trigger 1: there is no key 'steps'; known are "),
        ('[[trigger]]\nwhen = "xid"\nabove = 3', "trigger 1: there is no key 'above'; known are "),
        ('[[trigger]]\nwhen = "metric"\nmetric = "node_load1"\nabove = 1', "is no metric of ours; name one"),
        ('[[trigger]]\nwhen = "metric"\nmetric = "torchperfd_clients"', "set either above or below"),
        ('[[trigger]]\nwhen = "stall"\nname = "script"', "trigger 1: name: 'script' cannot be a name; use "),
        ('[[trigger]]\nwhen = "stall"\n[[trigger]]\nwhen = "stall"', "trigger 2: there are two of the name"),
        ('[[trigger]]\nevery = "1s"', "trigger 1: every: '1s' is out of range; choose at least 10s"),
        ('[[trigger]]\nevery = "10m"\nsteps = 5', "trigger 1: there is no key 'steps'; known are "),
        ('[[trigger]]\nevery = "10m"\n' * 101, "there are 101 triggers; write up to 100"),
    ],
)
def test_what_makes_no_sense_is_one_line_with_file_and_key(
    run: Run, tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = write(tmp_path / "a.toml", content)
    code, out, err = run("serve", "--config", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"torchperfd: {path}")
    assert says in err
    assert len(err) < 500


def test_a_file_that_is_not_there_is_said(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert run("config", "show", "--config", str(missing)) == (
        2,
        "",
        f"torchperfd: cannot read {missing}: No such file or directory; name a readable file with --config\n",
    )


KEYS = (
    "name when every action above below for metric labels xids steps cooldown per_day overhead with_stack odd"
)
tables = st.dictionaries(
    st.sampled_from(KEYS.split()),
    st.sampled_from(
        ["a", "metric", "stall", "xid", "straggler", "capture", "stacks", "torchperfd_clients", "10m", "30s"]
    )
    | st.booleans()
    | st.integers(-1, 200)
    | st.floats()
    | st.lists(st.integers(0, 120), max_size=2)
    | st.dictionaries(st.sampled_from(["rank", "phase"]), st.text(max_size=3), max_size=2),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@example("a = 1e999\n[trigger]\n")
@given(
    st.text() | st.binary() | st.sampled_from(EXAMPLE.splitlines()).flatmap(lambda line: st.just(line[:9]))
)
def test_any_file_is_read_or_refused(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "fuzz.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    with contextlib.suppress(ConfigError):
        read_file(file)


@given(st.lists(tables, max_size=3), st.none() | st.integers() | tables)
def test_any_tables_are_refused_or_round_trip_as_a_plan(trigger: list[Any], triggers: object) -> None:
    try:
        plan = read_plan({} if triggers is None else triggers, trigger, "a.toml")
    except BadValueError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert read_plan({"per_day": plan.per_day}, as_tables(plan), "again") == plan
    assert refusal.isprintable()


def test_triggers_have_their_defaults_by_what_they_wait_for() -> None:
    plan = read_plan(
        {},
        [
            {"when": "stall"},
            {"when": "step-time-regression"},
            {"when": "xid", "action": "stacks"},
            {"every": "10m"},
        ],
        "a.toml",
    )
    stall, regression, xid = plan.rules
    assert (stall.action.value, stall.hold_seconds, stall.cooldown_seconds, stall.per_day) == (
        "stacks",
        10.0,
        1800.0,
        10,
    )
    assert (regression.action.value, regression.above, regression.options.steps) == ("capture", 0.2, 5)
    assert (xid.name, xid.action.value, 79 in xid.xids, 31 in xid.xids) == ("xid", "stacks", True, False)
    assert plan.schedules == (Schedule("glance", 600.0, 0.001),)
    assert isinstance(stall, Rule)


def test_what_is_in_force_is_shown_with_its_origins(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "system.toml", 'captures_max_bytes = "1TiB"\nsocket_mode = "666"\n')
    chosen = write(tmp_path / "torchperfd.toml", EXAMPLE)
    monkeypatch.setenv("TORCHPERFD_METRICS_ADDRESS", "[::1]:9500")
    arguments = ("--config", str(chosen), "--log-level", "debug", "--demo")
    code, out, err = run("config", "show", "--origin", *arguments)
    assert (code, err) == (0, "")
    shown = out.replace(str(tmp_path), "/work")
    check_golden("config.txt", shown)


def test_what_is_shown_is_a_configuration_of_the_same_effect(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("config", "show", "--config", str(write(tmp_path / "a.toml", EXAMPLE)))
    again = write(tmp_path / "b.toml", out)
    _, out_again, _ = run("config", "show", "--config", str(again))
    assert out_again == out
    first, second = read_file(tmp_path / "a.toml"), read_file(again)
    assert first.plan == second.plan
    assert first.values.items() <= second.values.items()
    assert tomllib.loads(out)["captures_max_bytes"] == "50GB"


def test_what_is_in_force_as_json(run: Run, tmp_path: Path) -> None:
    chosen = write(tmp_path / "a.toml", EXAMPLE)
    code, out, err = run("config", "show", "--json", "--config", str(chosen))
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == "torchperfd.config/1"
    assert document["options"]["interval"] == {"value": 2.0, "origin": str(chosen)}
    assert document["options"]["web_config_file"] == {"value": None, "origin": "default"}
    assert "embedded" not in document["options"]
    assert document["triggers"]["per_day"] == 20
    assert [rule["name"] for rule in document["triggers"]["rules"]] == ["stall", "loader-starves", "glance"]


def test_an_embedded_daemon_takes_nothing_from_the_nodes_file(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "system.toml", "interval = 7\n")
    assert json.loads(run("config", "show", "--json")[1])["options"]["interval"]["value"] == 7.0
    out = run("config", "show", "--json", "--embedded")[1]
    assert json.loads(out)["options"]["interval"] == {"value": 1.0, "origin": "default"}


@pytest.mark.parametrize("page", ["configuration.md", "triggers.md"])
def test_what_the_documentation_shows_is_a_configuration(tmp_path: Path, page: str) -> None:
    (block,) = re.findall(r"```toml\n(.+?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    file = read_file(write(tmp_path / "a.toml", block))
    assert len(file.values) + len(file.plan.rules if file.plan else ()) >= 3


def test_docs_name_every_condition_with_its_defaults() -> None:
    table = re.findall(r"^\| `([a-z-]+)` \|.*\| (.+) \|$", (ROOT / "docs" / "triggers.md").read_text(), re.M)
    said = {name: keys for name, keys in table if name in {when.value for when in When}}
    assert set(said) == {when.value for when in When}
    for name, keys in said.items():
        if name == "metric":
            continue
        rule = read_plan({}, [{"when": name}], "defaults").rules[0]
        for key, value in (("above", rule.above), ("below", rule.below)):
            assert (f"`{key}` {value}" in keys) is (value is not None)
        assert (f"`for` {rule.hold_seconds:g}s" in keys) is bool(rule.hold_seconds)
