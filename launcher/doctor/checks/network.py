"""Checks of the connections between nodes."""

from __future__ import annotations

from typing import Any

from launcher.doctor.checks.collectives import rate
from launcher.doctor.checks.host import clock
from launcher.doctor.checks.row import ONE_KIND, Check
from launcher.doctor.values import Expected, Measured, Opinion, Verdict

LATENCY = 0.01
"Seconds of a round trip with a new connection. Within a data centre it takes less than a millisecond."
LOSS_POOR, LOSS_BROKEN = 0.02, 0.1
"Fraction of lost packets. TCP slows down at 0.001, which 100 packets cannot show."
BANDWIDTH = 125e6
"Bytes/s of one TCP connection if the profile does not set network.inter_node: 1 Gb/s."
BANDWIDTH_SHARE = 0.1
"Required fraction of the bandwidth: one TCP connection cannot fill a fast network, and other nodes send too."


def name(measured: Measured, expected: Expected) -> Opinion:
    value = measured.value
    if value["right"]:
        return Opinion("good", "its address")
    cure = "Correct /etc/hosts or DNS on this node, or use addresses: launcher itself needs no names."
    if value["addresses"]:
        cause = (
            f"{value['name']} resolves to {', '.join(value['addresses'])} here, which is not an address of "
            "that node. Programs that use host names (MPI, Ray, DeepSpeed's launcher) reach another machine, "
            "or themselves."
        )
        return Opinion("poor", "its address", cause, cure)
    slow = " after 5 s" if value["late"] else ""
    cause = f"{value['name']} does not resolve here{slow}. Programs that use host names do not connect."
    return Opinion("poor", "its address", cause, cure)


def port(measured: Measured, expected: Expected) -> Opinion:
    if not (closed := {number: state for number, state in measured.value.items() if state != "open"}):
        return Opinion("good", "open")
    state = next(iter(closed.values()))
    causes = {
        "no answer": "Packets to this port are dropped on the way: a firewall, or a wrong route.",
        "refused": "The node answers, but rejects the connection: a firewall, or another machine's address.",
    }
    if state not in causes:
        cure = "Look at the interface, its address and the routes: `ip addr`, `ip route`."
        return Opinion("broken", "open", f"The connection fails: {state}.", cure)
    tried = sorted(map(int, measured.value))  # from one end of the range to the other
    return Opinion(
        "broken",
        "open",
        causes[state],
        f"Allow TCP ports {tried[0]} to {tried[-1]} between the nodes in both directions (iptables, "
        "firewalld, security groups), or set network.interface to an interface that is not filtered.",
    )


def interfaces(measured: Measured, expected: Expected) -> Opinion:
    if not expected.interface or any(
        pair.endswith(f" to {expected.interface.lstrip('=')}") for pair in measured.value
    ):
        return Opinion("good", expected.interface or "")
    return Opinion(
        "broken",
        expected.interface,
        f"network.interface of the profile is {expected.interface}, through which that node does not answer.",
        "Set network.interface to one that connects the nodes, or remove it: launcher then finds one.",
    )


def adapters(measured: Measured, expected: Expected) -> Opinion:
    states = {port: port_state["state"] for port, port_state in measured.value.items()}
    wanted = "active"
    if waiting := [port for port, state in states.items() if state in ("INIT", "ARMED")]:
        cause = f"No subnet manager has configured {', '.join(waiting)}, so that NCCL does not use them."
        return Opinion("poor", wanted, cause, "Start the subnet manager (opensm, or that of the switch).")
    if "ACTIVE" in states.values():
        return Opinion("good", wanted)
    cause = "No port of an InfiniBand or RoCE adapter is active: NCCL uses TCP instead."
    return Opinion("poor", wanted, cause, "Look at `ibstat` and the cables; for RoCE, set the interface up.")


def latency(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"below {LATENCY * 1e3:g} ms"
    if measured.value < LATENCY:
        return Opinion("good", wanted)
    cause = "A round trip takes long: the nodes are far apart, busy, or packets get lost."
    return Opinion("poor", wanted, cause, "Ask for nodes of one switch or placement group.")


def clocks(measured: Measured, expected: Expected) -> Opinion:
    opinion = clock(measured, expected)
    cause = "The clocks of these nodes differ. " + opinion.cause.partition(". ")[2] if opinion.cause else ""
    return opinion._replace(cause=cause)


def mtu(measured: Measured, expected: Expected) -> Opinion:
    interface, passes = measured.value["interface"], measured.value["passes"]
    if passes >= interface:
        return Opinion("good", str(interface))
    return Opinion(
        "broken",
        str(interface),
        f"The interface sends packets of {interface} bytes, and those above {passes} are lost on the way. "
        "Small messages arrive and large ones hang.",
        f"Set the MTU of the interface to {passes} (ip link set dev NAME mtu {passes}), or that of every "
        f"switch on the way to {interface}.",
    )


def loss(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"below {LOSS_POOR:.0%}"
    if measured.value < LOSS_POOR:
        return Opinion("good", wanted)
    verdict: Verdict = "broken" if measured.value >= LOSS_BROKEN else "poor"
    cause = "Packets get lost. Each one delays a message by 0.2 s and more."
    return Opinion(verdict, wanted, cause, "Have cables, transceivers and the switch's ports checked.")


def bandwidth(measured: Measured, expected: Expected) -> Opinion:
    least = BANDWIDTH_SHARE * (expected.inter_node or BANDWIDTH)
    wanted = f"at least {rate(least)}"
    if measured.value >= least:
        return Opinion("good", wanted)
    cause = "The connection between these nodes is slow."
    cure = "Check the speed of the links (ethtool), and whether network.interface is the fast network."
    return Opinion("poor", wanted, cause, cure)


def _states(value: Any) -> str:
    """Return `open`, or the first other state, with its ports unless all ports have it."""
    bad = [state for state in value.values() if state != "open"]
    if not bad:
        return "open"
    ports = [port for port, state in value.items() if state == bad[0]]
    return bad[0] if len(ports) == len(value) else f"{bad[0]} at {', '.join(ports)}"


def _name(value: Any) -> str:
    return f"{value['name']}: {', '.join(value['addresses']) or 'nothing'}"


_STUCK = Opinion(
    "poor",
    "passes",
    "A connection opens, and data does not get through it in time.",
    "See the largest packet and the lost packets of this connection.",
)
_NO_UDP = Opinion("good", "", "UDP does not pass, which NCCL and gloo do not need.")


def _ports(value: Any) -> str:
    """Count equal ports: `8 active InfiniBand 400 Gb/sec, 1 down Ethernet`."""
    words = [
        " ".join(
            [
                port_state["state"].lower(),
                port_state["link"],
                *([port_state["rate"]] if port_state["state"] == "ACTIVE" else []),
            ]
        )
        for port_state in value.values()
    ]
    return ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))


def _row(*row: Any, **fields: Any) -> Check:
    return Check(*row, **{"of_node": False, **fields})


ROWS = (
    _row("name", "name of a node", "network", name, _name),
    _row("rendezvous-port", "rendezvous ports", "network", port, _states),
    _row("ephemeral-port", "ephemeral ports", "network", port, _states),
    _row("interfaces", "interfaces", "network", interfaces, lambda value: ", ".join(value) or "none"),
    Check(
        "adapters", "InfiniBand and RoCE ports", "network", adapters, _ports, alike="poor",
        alike_cure=ONE_KIND,
    ),
    _row(
        "latency", "round trip", "network", latency, lambda value: f"{value * 1e3:.2f} ms",
        unmeasured=_STUCK,
    ),
    _row("clocks", "difference of clocks", "network", clocks, lambda value: f"{value:+.2f} s"),
    _row("mtu", "largest packet", "network", mtu, lambda value: str(value["passes"]), unmeasured=_NO_UDP),
    _row("loss", "lost packets", "network", loss, lambda value: f"{value:.0%}", unmeasured=_NO_UDP),
    _row("bandwidth", "one connection", "network", bandwidth, rate, unmeasured=_STUCK),
)  # fmt: skip
