"""`python -m launcher.doctor [RUN_DIR]`: examine this node. start.sh runs it before the ranks.

In the run of an ordinary job, this is a quick check of the node, which takes at most CHECK_SECONDS. If the
node is broken, it prints the reason as one line on stdout and exits with EXIT_SICK. Between two attempts,
only faults that may have ended the first one count. In the doctor's own run, it continues with the tests
that the options of the run's command ask for.

With RUN_DIR, it runs before any attempt and writes nothing. Slurm's check-node.sh excludes nodes that fail.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from launcher.doctor.checks import CHECKS
from launcher.doctor.checks.host import SOFTWARE
from launcher.doctor.coordinator import Coordinator
from launcher.doctor.examine import examine
from launcher.doctor.heartbeat import heartbeat, monitored
from launcher.doctor.leftovers import Leftovers
from launcher.doctor.measure.group import Group
from launcher.doctor.measure.listener import Listener
from launcher.doctor.measure.network import identity
from launcher.doctor.node_rank import Place
from launcher.doctor.on_node import OnNode, measure_node
from launcher.doctor.order_files import Orders
from launcher.doctor.page import page
from launcher.doctor.values import Measured
from launcher.spec import variables
from launcher.spec.one_line import plain
from launcher.spec.verdict import EXIT_SICK

NODE = 0
"Number of the first, implicit order: every node measures itself."
START_SECONDS = 60.0
"Time that node 0 waits for the other nodes. All are in one allocation, but a node may start late."


CHECK_SECONDS = 60.0
"Time limit of the check before a job's ranks start. If a file system hangs, the ranks will run into it."


def main() -> int:
    """Return 0, or EXIT_SICK if the node of an ordinary job is broken."""
    own_variables, job_variables = variables.split(os.environ)
    os.environ.update(job_variables)  # measure with the variables that the ranks will have
    before_attempts = len(sys.argv) > 1
    place = Place.of({variables.RUN_DIR: sys.argv[1]} if before_attempts else own_variables)
    if before_attempts and place.options is not None:
        return 0  # the doctor's own run examines the sick nodes as well
    with Leftovers() as leftovers:
        orders = Orders(place.attempt.path / "doctor", place.node, place.expected.nodes)
        if place.options is None:
            return _check_node(place, leftovers, None if before_attempts else orders)
        _lead_or_follow(place, leftovers, orders)
    return 0


def _lead_or_follow(place: Place, leftovers: Leftovers, orders: Orders) -> None:
    """Do the part of this node in the doctor's own run."""
    with Group() as group, ExitStack() as stack:
        assert place.options is not None
        if place.options.level != "quick":
            group.start()  # it imports torch while this process measures
        on_node = OnNode(place, group, leftovers)
        answer: dict[str, Any] = {}
        if place.expected.nodes > 1:
            listener = stack.enter_context(Listener(place.port, orders.answer if place.leads else None))
            answer["identity"] = {**identity(place.host, place.port), "ports": listener.ports}
            if place.leads:
                monitor = stack.enter_context(monitored(orders))
                on_node.lost = lambda: monitor.lost
            else:
                stack.enter_context(heartbeat(orders, answer["identity"]))
        answer["values"] = [asdict(value) for value in measure_node(place, leftovers)]
        on_node.answer(orders, NODE, answer)
        if place.leads:
            Coordinator(on_node, orders).examine(orders.wait_for_answers(NODE, START_SECONDS, on_node.lost))
        else:
            on_node.follow(orders)


def _check_node(place: Place, leftovers: Leftovers, orders: Orders | None) -> int:
    """Examine the node of an ordinary job. Write the values if `orders` is given. Return the exit code."""
    faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    values = measure_node(place, leftovers)
    if orders is not None:
        with suppress(OSError):  # an unwritable folder is itself one of the values
            orders.answer(NODE, {"values": [asdict(value) for value in values]})
    return _print_values(values, place)


def _print_values(values: Sequence[Measured], place: Place) -> int:
    """Print findings that are not good to stderr, and faults as one line to stdout. Return the exit code."""
    skipped_checks = SOFTWARE if place.expected.command else frozenset()
    findings = examine([value for value in values if value.check not in skipped_checks], place.expected)
    bad = [finding for finding in findings if finding.verdict != "good"]
    if bad:
        print("\n".join(page(f"doctor: node {place.node}", bad, 1)), file=sys.stderr)
    broken = [finding for finding in bad if finding.verdict == "broken"]
    if place.between_attempts and place.trained:
        broken = [finding for finding in broken if not CHECKS[finding.check].fixed]
    print(
        plain(
            "; ".join(
                f"{finding.title} {finding.measured}: {finding.cause.rstrip('.')}" for finding in broken
            )
        )
    )
    return EXIT_SICK if broken else 0


if __name__ == "__main__":
    sys.exit(main())
