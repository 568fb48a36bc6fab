"""GPUDirect RDMA from /sys: a node with two GPUs and two adapters, as the kernel shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.doctor.examine import examine
from launcher.doctor.measure.gdr import measure_gdr
from launcher.doctor.values import Expected

NEAR = "pci0000:80/0000:80:01.0/0000:81:00.0"
"A PCIe switch of the second socket."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    places = {
        f"{NEAR}/0000:82:00.0": ("0x10de", "0x030200", "1"),
        "pci0000:00/0000:00:01.0/0000:01:00.0": ("0x10de", "0x030200", "0"),
        f"{NEAR}/0000:83:00.0": ("0x15b3", "0x020700", "1"),
        "pci0000:00/0000:00:02.0/0000:02:00.0": ("0x15b3", "0x020700", "0"),
    }
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for place, (vendor, kind, numa) in places.items():
        device = tmp_path / "sys/devices" / place
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", numa)):
            (device / name).write_text(f"{text}\n")
        (tmp_path / "sys/bus/pci/devices" / device.name).symlink_to(device)
    for name, number in (("mlx5_0", "0000:02:00.0"), ("mlx5_1", "0000:83:00.0")):
        adapter = tmp_path / "sys/class/infiniband" / name
        adapter.mkdir(parents=True)
        (adapter / "device").symlink_to(tmp_path / "sys/bus/pci/devices" / number)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("5.15.0-91-generic\n")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path


def test_which_adapters_are_near_which_gpu(root: Path) -> None:
    _, first, second = measure_gdr(0, root)
    assert first.value == {"mlx5_0": "host bridge", "mlx5_1": "system"}
    assert second.value == {"mlx5_0": "system", "mlx5_1": "switch"}
    found = examine([first, second], Expected(gpus_per_node=2))
    assert {one.verdict for one in found} == {"good"}


def test_a_gpu_far_from_every_adapter(root: Path) -> None:
    (root / "sys/class/infiniband/mlx5_1/device").unlink()
    (root / "sys/class/infiniband/mlx5_1").rmdir()
    found = examine(list(measure_gdr(0, root))[1:], Expected(gpus_per_node=2))
    [far] = [one for one in found if one.verdict == "poor"]
    assert far.subjects == ("GPU 1",) and far.measured == "mlx5_0: system"


@pytest.mark.parametrize(
    ("driver", "module", "verdict"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54", None, "poor"),
        ("NVIDIA UNIX x86_64 Kernel Module  550.54", "nvidia_peermem", "good"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  550.54", None, "good"),
    ],
)
def test_what_the_kernel_supports(root: Path, driver: str, module: str | None, verdict: str) -> None:
    (root / "proc/driver/nvidia/version").write_text(driver)
    if module is not None:
        (root / "sys/module" / module).mkdir(parents=True)
    [found, *_] = examine([next(measure_gdr(0, root))], Expected(gpus_per_node=2))
    assert found.verdict == verdict


def test_without_adapters_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(measure_gdr(0, tmp_path)) == []
