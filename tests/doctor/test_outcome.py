"""What ranks tell is judged without them: times, wrong values, hangs, and who is to blame."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from launcher.doctor.interpret import values_of
from launcher.doctor.order_files import NOTE, TESTS
from launcher.doctor.outcome import BUS, Outcome, common, culprits, outcome, pair_rounds, pairs_of, rounds
from launcher.doctor.rank_test import RankReport, RankTest
from launcher.doctor.values import Measured


def told(rank: int, **more: Any) -> RankReport:
    result = {"name": "all-reduce", "bytes": 2**20, "seconds": 0.1, "wrong": []}
    return RankReport(**{"rank": rank, "ended": True, "at": "x", "done": 2, "results": (result,), **more})


def test_of(*ranks: int) -> RankTest:
    return RankTest("collective", {"name": "all-reduce"}, ranks, "127.0.0.1", 61000, 10.0)


test_of.__test__ = False  # type: ignore[attr-defined]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md of nccl-tests, for 4 ranks."""
    factors = {name: factor(4) for name, factor in BUS.items()}
    assert factors == {
        "all-reduce": 1.5, "all-gather": 0.75, "reduce-scatter": 0.75, "all-to-all": 0.75,
        "broadcast": 1.0, "point-to-point": 1.0,
    }  # fmt: skip
    slow = {"name": "all-reduce", "bytes": 2**20, "seconds": 0.2, "wrong": []}
    found = outcome(test_of(0, 1), [told(0), told(1, results=(slow,))])
    assert found.ok and found.sizes == ({"bytes": 2**20, "seconds": 0.2, "bus": 2**20 / 0.2},)


def test_a_hang_names_the_stopped_rank_or_the_one_that_is_behind() -> None:
    late: dict[str, Any] = {"ended": False, "state": "S"}
    stopped = outcome(test_of(0, 1, 2), [told(0, **late), told(1, **{**late, "state": "T"}), told(2, **late)])
    assert (stopped.kind, stopped.ranks, stopped.waiting, stopped.state) == ("hang", (1,), (0, 2), "T")
    behind = outcome(test_of(0, 1, 2), [told(0, **late), told(1, **late), told(2, **{**late, "done": 1})])
    assert behind.ranks == (2,)
    nobody = outcome(test_of(0, 1), [told(0, **late), told(1, **late)])
    assert (nobody.kind, nobody.ranks) == ("hang", ())
    silent = outcome(test_of(0, 1), [told(0, **late)])
    assert (silent.ranks, silent.error) == ((1,), "the rank was not started")


def test_an_error_names_the_rank_that_ended_first() -> None:
    lost = told(0, error="RuntimeError: Connection closed by peer")
    killed = outcome(test_of(0, 1), [lost, told(1, error="ended by SIGKILL")])
    assert (killed.kind, killed.ranks, killed.error) == ("error", (1,), "ended by SIGKILL")
    alike = outcome(test_of(0, 1), [lost, told(1, error="RuntimeError: no interface")])
    assert (alike.kind, alike.ranks) == ("error", ())


@pytest.mark.parametrize(
    ("pairs", "blamed"),
    [
        ([(0, 2), (1, 2), (3, 2)], (2,)),  # what rank 2 sends is wrong everywhere
        ([(2, 0), (2, 1), (2, 3)], (2,)),  # rank 2 gets everything wrong
        ([(0, 2)], (0, 2)),  # one of them, or the way between
        ([(2, None)], (2,)),  # only rank 2 has a wrong sum
        ([(0, None), (1, None), (2, None), (3, None)], ()),
    ],
)
def test_wrong_values_name_their_rank(pairs: list[tuple[int, int | None]], blamed: tuple[int, ...]) -> None:
    assert culprits(pairs, (0, 1, 2, 3)) == blamed


def test_the_rank_or_pair_that_explains_all_bad_pairs() -> None:
    everyone = [pair for one in rounds(range(4)) for pair in one]
    assert len(everyone) == 6 and len({rank for pair in rounds(range(4))[0] for rank in pair}) == 4
    assert common([(0, 2), (1, 2), (2, 3)], everyone) == (2,)
    assert common([(0, 1)], everyone) == () and common(everyone, everyone) == ()
    quick = {"bytes": 2**20, "seconds": 0.01, "bus": 1e8}
    times = {
        pair: Outcome("ok", sizes=({**quick, "seconds": 1.0 if 2 in pair else 0.01},)) for pair in everyone
    }
    assert pairs_of(times, slow=True).culprits == (2,) and not pairs_of(times).bad


def test_many_nodes_meet_few_others() -> None:
    pairs = [pair for one in rounds(range(64)) for pair in one]
    assert len(rounds(range(64))) == 6 and len(pairs) == 6 * 32 and len(set(pairs)) == len(pairs)


def test_pairs_within_all_nodes_are_tested_at_the_same_time() -> None:
    """One node after the other, 64 nodes took longer than the time limit of the doctor's run."""
    large = pair_rounds(64, 8)
    assert len(large) == 6 + 7, "64 nodes with some others, and 8 ranks of each node with each other"
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in large)
    within = {pair for one in large for pair in one if pair[0] // 8 == pair[1] // 8}
    assert len(within) == 64 * 8 * 7 // 2
    assert len(pair_rounds(20, 1)) == 5 and all(pair_rounds(20, 1)), "no round is empty"
    assert pair_rounds(2, 2) == rounds(range(4))


def test_a_test_that_not_all_nodes_have_answered_is_judged_once_it_is_over() -> None:
    """Until then it goes on, or the run has been cut off, for example since Slurm ended its step."""
    order = {"do": TESTS, "check": "joined", "tests": [asdict(test_of(0, 1))]}
    answers = {0: {"told": [[asdict(RankReport(0, True))]]}}
    assert values_of([(order, answers)], nodes=2) == []
    note = ({"do": NOTE, "values": [asdict(Measured("alive", 1, None))]}, {0: {}})
    found = {one.check: one.value for one in values_of([(order, answers), note], nodes=2)}
    assert found["joined"]["kind"] == "hang" and found["joined"]["ranks"] == (1,) and "alive" in found
