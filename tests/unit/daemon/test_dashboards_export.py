"""``torchperfd dashboards export``: what it writes, and where it comes from."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from tests.support.node import ROOT

import torchperfd_daemon
from torchperfd_cli.commands.open import shipped_files
from torchperfd_cli.main import cli, run_command


def export(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["dashboards", "export", *arguments])
    assert result.exit_code == 0, result.output
    return result


def written(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_export_writes_every_file_and_lists_it(tmp_path: Path) -> None:
    result = export(str(tmp_path / "out"))
    names = written(tmp_path / "out")
    assert set(result.stdout.splitlines()) == {str(tmp_path / "out" / name) for name in names}
    assert {name for name in names if name.startswith("dashboards/")} == {
        f"dashboards/{name}.json" for name in ("daemon", "fleet", "node", "rank", "run")
    }
    assert {
        "alerts/torchperfd.rules.yaml",
        "provisioning/dashboards/torchperfd.yaml",
        "provisioning/datasources/prometheus.yaml",
        "runbooks/runbooks.md",
        "runbooks/causes/hang.md",
    } <= names
    assert result.stderr == (
        f"alerts have no runbook_url: publish {tmp_path / 'out' / 'runbooks'} as HTML, and export with"
        " --runbooks URL, its address\n"
    )
    fleet = json.loads((tmp_path / "out" / "dashboards" / "fleet.json").read_text())
    assert fleet["uid"] == "torchperfd-fleet"


def test_export_with_addresses_puts_them_into_the_files(tmp_path: Path) -> None:
    result = export(
        *(str(tmp_path), "--prometheus", "http://metrics:9090", "--mount", "/boards"),
        *("--runbooks", "https://wiki.example/torch/"),
    )
    assert result.stderr == ""
    rules = yaml.safe_load((tmp_path / "alerts" / "torchperfd.rules.yaml").read_text())
    urls = [
        rule["annotations"]["runbook_url"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(urls) > 20
    section = re.compile(r"https://wiki\.example/torch/(causes/)?[a-z-]+\.html#torchperfd\w+")
    assert all(section.fullmatch(url) for url in urls)
    source = yaml.safe_load((tmp_path / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://metrics:9090"
    provider = yaml.safe_load((tmp_path / "provisioning" / "dashboards" / "torchperfd.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/boards"


def exported(directory: Path, *arguments: str) -> dict[str, str]:
    export(str(directory), *arguments)
    return {
        name: (directory / name).read_text()
        for name in written(directory)
        if name.startswith(("alerts/", "dashboards/"))
    }


def test_export_with_a_selector_is_what_the_generator_writes(tmp_path: Path) -> None:
    """The generator puts the matchers into each query itself; the export has only the files."""
    selector = 'cluster="one",team=~"a|b"'
    code = (
        "import json\nimport grafana.config\n"
        f"grafana.config.SELECTOR = {selector!r}\n"
        "from grafana.build import files\nprint(json.dumps(files()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    generated = json.loads(done.stdout)
    found = exported(tmp_path, "--selector", selector)
    assert found == {name: generated[name] for name in found}
    assert len(found) == 6
    plain = exported(tmp_path / "plain")
    assert all(found[name] != text for name, text in plain.items())


@pytest.mark.needs("promtool")
def test_exported_rules_pass_promtool(tmp_path: Path) -> None:
    export(str(tmp_path), "--selector", 'cluster="one"', "--runbooks", "https://wiki.example/torch")
    rules = str(tmp_path / "alerts" / "torchperfd.rules.yaml")
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout


@pytest.mark.parametrize(
    "text", ["", "cluster", "cluster=one", 'cluster="a",', 'a="b" c="d"', 'a="b"} or up{']
)
def test_export_selector_that_is_none_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["dashboards", "export", str(tmp_path), "--selector", text]) == 2
    assert "has no matchers such as cluster=" in capsys.readouterr().err
    assert written(tmp_path) == set()


def test_export_has_the_section_of_each_runbook_url(tmp_path: Path) -> None:
    export(str(tmp_path), "--runbooks", "https://wiki.example")
    rules = (tmp_path / "alerts" / "torchperfd.rules.yaml").read_text()
    named = re.findall(r"runbook_url: https://wiki\.example/(\S+)\.html#(\w+)", rules)
    assert len(named) > 20
    for page, anchor in named:
        assert anchor in anchors(tmp_path / "runbooks" / f"{page}.md")


def test_export_without_address_names_the_section_of_a_page(tmp_path: Path) -> None:
    export(str(tmp_path))
    text = (tmp_path / "alerts" / "torchperfd.rules.yaml").read_text()
    assert "runbook_url" not in text
    named = re.findall(r"runbook: (\S+\.md)#(\w+)$", text, re.MULTILINE)
    assert len(named) > 20
    for page, anchor in named:
        assert anchor in anchors(tmp_path / "runbooks" / page)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return {"-".join(heading.lower().split()) for heading in headings}


def test_exported_pages_have_no_dead_links(tmp_path: Path) -> None:
    export(str(tmp_path))
    pages = sorted((tmp_path.resolve() / "runbooks").rglob("*.md"))
    found = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked in pages, f"{page}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page}: {target}"
            found += 1
    assert found > 50


def test_exported_page_has_the_text_of_links_to_other_pages(tmp_path: Path) -> None:
    export(str(tmp_path))
    page = (tmp_path / "runbooks" / "causes" / "hang.md").read_text()
    assert page.startswith("# hang\n\nNo step has ended for longer than the stall limit.\n")


def test_export_without_mount_names_its_own_directory(tmp_path: Path) -> None:
    export(str(tmp_path))
    provider = yaml.safe_load((tmp_path / "provisioning" / "dashboards" / "torchperfd.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(tmp_path / "dashboards")


def test_export_into_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dashboards").write_text("")
    (tmp_path / "alerts").write_text("")
    assert run_command(["dashboards", "export", str(tmp_path)]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_files_of_a_wheel_are_those_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    package = tmp_path / "site-packages" / "torchperfd_daemon"
    for source, target in build["hooks"]["custom"]["exported"].items():
        place = package.parent / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place)
        else:
            shutil.copy(ROOT / source, place)
    of_checkout = shipped_files()
    monkeypatch.setattr(torchperfd_daemon, "__file__", str(package / "__init__.py"))
    assert shipped_files() == of_checkout


def test_installation_without_the_files_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "a" / "b" / "torchperfd_daemon"
    monkeypatch.setattr(torchperfd_daemon, "__file__", str(package / "__init__.py"))
    assert run_command(["dashboards", "export", str(tmp_path / "out")]) == 1
    assert "not part of this installation" in capsys.readouterr().err
