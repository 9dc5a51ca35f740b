"""A real daemon on a fake driver: what operators see on the metrics page in each scenario."""

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.fakes.nvml import GIB, H100_METRICS, MISSING_IN_OLD_DRIVERS, Driver, block, gpu, scenario
from tests.support.node import EXAMPLE, Node, eventually

pytestmark = pytest.mark.needs("gcc")

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fetch(node: Node) -> Page:
    """Return the page's samples by name, without its prefix, and labels."""
    return {
        (sample.name.removeprefix("torchperfd_"), frozenset(sample.labels.items())): sample.value
        for family in parse_text(node.get("/metrics")[1])
        for sample in family.samples
    }


def of_gpu(page: Page, gpu: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return one GPU's samples by name, and the values of labels beyond the GPU's, by label name."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for (name, labels), value in page.items():
        own = dict(labels)
        if own.pop("gpu", None) == gpu:
            own.pop("gpu_uuid")
            found.setdefault(name, {})[tuple(own[label] for label in sorted(own))] = value
    return found


def serve(
    node: Node, *gpus: str, driver: str = "580.95.05", without: tuple[str, ...] = ()
) -> tuple[Driver, Callable[[], Page]]:
    """Start a daemon on a fake driver.

    Returns:
        The driver, and a function that waits until what is true now has been sampled twice, and
        returns the page.
    """
    fake = Driver(node.directory, scenario(*gpus, driver=driver), without)
    node.env |= fake.env
    node.start_daemon("--interval", "0.05")

    def settled() -> Page:
        last = 'torchperfd_collector_last_success_timestamp_seconds{collector="nvml"}'
        for _ in range(3):
            before = node.metric(last)
            eventually(lambda before=before: node.metric(last) != before, 20, node.log)  # type: ignore[misc]
        return fetch(node)

    return fake, settled


def test_eight_healthy_gpus(node: Node) -> None:
    _, settled = serve(node, *(gpu(index, power_mw=100_000 + index) for index in range(8)))
    page = settled()
    everything = of_gpu(page, "7")
    expected = {
        **H100_METRICS,
        "gpu_info": {("580.95.05", "NVIDIA H100 80GB HBM3", "00000000:08:00.0"): 1},
        "gpu_power_watts": {(): 100.007},
        "gpu_energy_joules_total": {(): 12345.678},
        "gpu_nvlink_bytes_total": {("receive",): 3000 * 1024, ("transmit",): 1000 * 1024},
        "gpu_ecc_errors_total": {
            ("volatile", "corrected"): 1,
            ("aggregate", "corrected"): 2,
            ("volatile", "uncorrected"): 3,
            ("aggregate", "uncorrected"): 4,
        },
    }
    throttled, pcie = everything.pop("gpu_throttle_seconds_total"), everything.pop("gpu_pcie_bytes_total")
    assert everything == expected
    assert throttled[("sw_power_cap",)] == 1.5
    assert throttled[("hw_thermal_slowdown",)] == 0.125
    # Twice and a half as fast in as out, over however long it has been.
    assert pcie[("receive",)] == pytest.approx(2.5 * pcie[("transmit",)])
    assert pcie[("transmit",)] > 0
    assert [of_gpu(page, str(index))["gpu_power_watts"][()] for index in range(8)] == [
        100 + index / 1000 for index in range(8)
    ]
    assert node.metric('torchperfd_collector_success{collector="nvml"}') == 1


def test_an_instance_of_a_gpu(node: Node) -> None:
    facts = {"uuid": "MIG-a", "name": "MIG 1g.10gb", "gpu_instance": 7, "gpm.2": 50}
    memory = {"memory_total_bytes": 10 * GIB, "memory_used_bytes": GIB}
    instance = block("mig 0", {**facts, **memory})
    _, settled = serve(node, gpu(0, mig_mode=1, utilization_percent=None), instance)
    page = settled()
    assert of_gpu(page, "0:0") == {
        "gpu_info": {("580.95.05", "MIG 1g.10gb", "00000000:01:00.0"): 1},
        "gpu_mig_info": {("0", "GPU-00000000"): 1},
        "gpu_memory_used_bytes": {(): GIB},
        "gpu_memory_total_bytes": {(): 10 * GIB},
        "gpu_sm_active_ratio": {(): 0.5},
    }
    assert "gpu_utilization_ratio" not in of_gpu(page, "0")


def test_old_driver_and_gpu_with_few_metrics_are_read(node: Node) -> None:
    little = gpu(1, energy_mj=None, power_mw="!3", **{"field.82": None}, ecc_corrected_volatile=None)
    _, settled = serve(node, gpu(0), little, driver="470.82.01", without=MISSING_IN_OLD_DRIVERS)
    page = settled()
    first, second = of_gpu(page, "0"), of_gpu(page, "1")
    assert first.keys() - second.keys() == {"gpu_power_watts", "gpu_energy_joules_total"}
    assert first["gpu_memory_used_bytes"] == {(): 60.5 * GIB}
    assert first["gpu_temperature_celsius"] == {("gpu",): 61, ("memory",): 72}
    assert second["gpu_temperature_celsius"] == {("gpu",): 61}
    assert ("volatile", "corrected") not in second["gpu_ecc_errors_total"]
    assert not {name for name in first if "active" in name or "occupancy" in name or "pcie" in name}
    assert "Traceback" not in node.log()


def test_xid_errors_throttling_and_a_gpu_that_falls_off_the_bus(node: Node) -> None:
    facts = {f"field.{number}": None for number in (74, 76, 251, 252, 253)}
    driver, settled = serve(node, gpu(0), gpu(1, **facts))
    assert "gpu_xid_errors_total" not in of_gpu(settled(), "1")

    driver.follow(scenario(gpu(0), gpu(1, "xid 63", reasons=0x48, **facts)))
    found = of_gpu(settled(), "1")
    assert found["gpu_xid_errors_total"] == {("63",): 1}
    assert found["gpu_xid_last_timestamp_seconds"][("63",)] == pytest.approx(
        node.metric('torchperfd_collector_last_success_timestamp_seconds{collector="nvml"}'), abs=60
    )
    hot = found["gpu_throttle_seconds_total"]
    assert hot[("hw_thermal_slowdown",)] == hot[("hw_slowdown",)] > 0
    assert hot[("hw_power_brake_slowdown",)] == 0

    driver.follow(scenario(gpu(0), gpu(1, "xid 63", "xid 79", "lost 1")))
    page = settled()
    assert of_gpu(page, "1").keys() == {
        "gpu_up",
        "gpu_xid_errors_total",
        "gpu_xid_last_timestamp_seconds",
    }
    assert of_gpu(page, "1")["gpu_up"] == {(): 0}
    assert of_gpu(page, "1")["gpu_xid_errors_total"] == {("63",): 1, ("79",): 1}
    assert of_gpu(page, "0")["gpu_utilization_ratio"] == {(): 0.97}
    assert node.metric('torchperfd_collector_success{collector="nvml"}') == 1
    assert node.log().count("GPU 1 GPU-00000001 is lost") == 1

    driver.follow(scenario(gpu(0), gpu(1, "xid 63", "xid 79", **facts)))
    assert of_gpu(settled(), "1")["gpu_up"] == {(): 1}


def test_slow_and_hanging_calls_affect_gpu_metrics_only(node: Node) -> None:
    driver, settled = serve(node, gpu(0, delay_ms=5))
    assert of_gpu(settled(), "0")["gpu_up"] == {(): 1}
    slow = node.metric('torchperfd_collector_duration_seconds{collector="nvml"}')
    assert slow is not None
    assert slow >= 0.005 * 10

    driver.follow(scenario(gpu(0, hang="nvmlDeviceGetPowerUsage")))

    def sampled() -> tuple[float, list[float]]:
        """Return when GPUs were last sampled, and when each other thing was."""
        last = {
            dict(labels)["collector"]: value
            for (name, labels), value in fetch(node).items()
            if name == "collector_last_success_timestamp_seconds"
        }
        return last.pop("nvml"), sorted(last.values())

    def stuck_while_others_go_on() -> bool:
        before, _ = sampled()
        for _ in range(5):
            _, seen = sampled()
            eventually(lambda seen=seen: sampled()[1] != seen, 20, node.log)  # type: ignore[misc]
        return sampled()[0] == before

    eventually(stuck_while_others_go_on, 20, node.log)
    assert node.metric("torchperfd_node_cpu_utilization_ratio") is not None

    driver.follow(scenario(gpu(0, power_mw=1000)))
    eventually(lambda: node.metric("torchperfd_gpu_power_watts{") == 1, 20, node.log)


def test_a_ranks_memory_is_its_processes(node: Node) -> None:
    driver, settled = serve(node, gpu(0), gpu(1))
    # The driver is for the daemon alone: torch asks NVML too.
    with node.train("--epochs", "500", script=EXAMPLE, TORCHPERFD_RUN="bert", LD_LIBRARY_PATH="") as process:
        held = f"process {process.pid} {3 * GIB}"
        driver.follow(scenario(gpu(0, held), gpu(1, held, "process 999999 1")))
        eventually(lambda: node.metric("torchperfd_process_gpu_memory_bytes{"), 60, node.log)
        assert settled()["process_gpu_memory_bytes", frozenset({("run", "bert"), ("rank", "0")})] == 6 * GIB
        driver.follow(scenario(gpu(0), gpu(1)))
        assert "process_gpu_memory_bytes" not in {name for name, _ in settled()}
        process.kill()
        process.communicate()


def test_a_demo_shows_gpus_where_there_are_none(node: Node) -> None:
    node.start_daemon("--demo", "--interval", "0.1")
    eventually(lambda: node.metric('torchperfd_collector_success{collector="simulated"}') == 1, 20, node.log)
    page = fetch(node)
    assert [of_gpu(page, str(index))["gpu_up"] for index in range(8)] == [{(): 1}] * 8
    assert ("collector_success", frozenset({("collector", "nvml")})) not in page
    energy = of_gpu(page, "0")["gpu_energy_joules_total"][()]
    eventually(lambda: of_gpu(fetch(node), "0")["gpu_energy_joules_total"][()] > energy, 20, node.log)
