"""InfiniBand and RoCE ports from /sys, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.doctor.examine import examine
from launcher.doctor.measure.adapters import measure_adapters
from launcher.doctor.values import Expected, Measured

ACTIVE = ("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand")
DOWN = ("1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)", "Ethernet")
WAITING = ("2: INIT", "5: LinkUp", "200 Gb/sec (4X HDR)", "InfiniBand")


def node_with(root: Path, number: int, *ports: tuple[str, str, str, str]) -> list[Measured]:
    for index, values in enumerate(ports):
        port = root / f"node-{number}/sys/class/infiniband/mlx5_{index}/ports/1"
        port.mkdir(parents=True)
        for name, text in zip(("state", "phys_state", "rate", "link_layer"), values, strict=True):
            (port / name).write_text(f"{text}\n")
    return list(measure_adapters(number, root / f"node-{number}"))


@pytest.mark.parametrize(
    ("ports", "verdict", "shown"),
    [
        ([ACTIVE, ACTIVE, DOWN], "good", "2 active InfiniBand 400 Gb/sec, 1 down Ethernet"),
        ([DOWN], "poor", "1 down Ethernet"),
        ([ACTIVE, WAITING], "poor", "1 active InfiniBand 400 Gb/sec, 1 init InfiniBand"),
    ],
)
def test_a_node_with_adapters(
    tmp_path: Path, ports: list[tuple[str, str, str, str]], verdict: str, shown: str
) -> None:
    [found] = examine(node_with(tmp_path, 0, *ports), Expected())
    assert (found.verdict, found.measured) == (verdict, shown)
    assert verdict == "good" or (found.cause and found.cure)
    assert "mlx5_1:1" in found.cause or WAITING not in ports, "the port is named"


def test_the_node_with_fewer_active_ports_is_named(tmp_path: Path) -> None:
    values = [
        one for node in range(3) for one in node_with(tmp_path, node, *[ACTIVE] * (1 if node == 1 else 2))
    ]
    [differs] = [one for one in examine(values, Expected(nodes=3)) if one.verdict != "good"]
    assert differs.nodes == (1,) and "1 active InfiniBand 400 Gb/sec on node 1" in differs.cause


def test_without_adapters_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert node_with(tmp_path, 0) == []
