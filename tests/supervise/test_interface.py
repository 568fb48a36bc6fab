"""The interface by which the nodes of a run reach each other."""

from __future__ import annotations

import socket

import pytest

from launcher.supervise.interface import addresses, nccl, own_address


def test_the_addresses_of_this_host_are_found_with_their_interfaces() -> None:
    names = {name for _, name in socket.if_nameindex()}
    found = addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= names
    assert own_address("127.0.0.1", 9) == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("eth0", ["lo", "eth0"], None),
        ("eth0", ["lo", "docker0", "eth0", "eth1"], None),
        ("eth0", ["lo", "virbr0", "eth0"], "=eth0"),
        ("eth1", ["lo", "eth0", "eth1"], "=eth1"),
        ("eth1", ["lo", "eth0", "eth1", "ib0"], None),
        (None, ["lo", "eth0"], None),
    ],
)
def test_nccl_is_told_where_it_would_take_another_interface(
    name: str | None, names: list[str], expected: str | None
) -> None:
    assert nccl(name, names) == expected
