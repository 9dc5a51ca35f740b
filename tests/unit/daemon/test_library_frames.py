"""Which frames are libraries', and what is known of the capture to which a trace belongs."""

from pathlib import Path

import pytest
from tests.unit.daemon.kept import add
from tests.unit.daemon.traces import event, trace_of

from torchperfd_cli.commands._traces import capture_facts
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.python_frames import is_library
from torchperfd_daemon.captures import Catalog


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("train.py(3): main", False),
        ("/home/me/project/model.py(70): forward", False),
        ("project/torch/model.py(70): forward", False),
        ("nn.Module: Linear_0", False),
        ("aten::linear", False),
        ("torch/nn/modules/module.py(1751): _call_impl", True),
        ("threading.py(982): run", True),
        ("<built-in method linear of type object at 0x7f>", True),
        ("<frozen importlib._bootstrap>(1171): _find_and_load", True),
        ("/opt/venv/lib/python3.12/site-packages/mylib/a.py(1): f", True),
        ("/usr/lib/python3.11/queue.py(1): get", True),
        ("numpy/core/numeric.py(4): ones", True),
    ],
)
def test_frame_is_a_librarys_by_its_path(name: str, library: bool) -> None:
    assert is_library(name) is library


def test_devices_of_a_trace_are_named_once() -> None:
    devices = [{"id": number, "name": "NVIDIA H100", "totalGlobalMem": 5} for number in range(2)]
    summary = analysis.summarise(trace_of([event("aten::mul", 0, 10)], deviceProperties=devices))
    assert analysis.to_dict(summary, 0)["trace"]["device_names"] == ["NVIDIA H100"]


def test_capture_of_a_trace_has_its_run_and_time(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "captures")
    record = add(catalog, "20260101T000000Z-aaaaaa", {0: b"{}", 1: b"{}"})
    folder = catalog.folder(record.capture_id)
    for paths in ([folder], [folder / "rank0.json"], [folder / "rank0.json", folder / "rank1.json"]):
        facts = capture_facts(paths)
        assert facts is not None
        assert (facts["run"], facts["capture_id"]) == (record.run, record.capture_id)
        assert facts["requested_at"] == record.requested_at


def test_trace_outside_of_a_capture_has_no_facts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert capture_facts([tmp_path]) is None
    assert capture_facts([tmp_path / "trace.json"]) is None
    assert capture_facts([tmp_path / "trace.json", tmp_path / "other"]) is None
