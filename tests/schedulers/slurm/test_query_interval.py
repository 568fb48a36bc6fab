"""How often a follower asks Slurm: a clock of the test's, files of a run."""

from __future__ import annotations

import itertools
from pathlib import Path

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.slurm.query_interval import Pace


class Follower:
    """Looks five times a second."""

    def __init__(self, folder: Path) -> None:
        self.run, self.now = RunDir(folder), 0.0
        replace_json(self.run.state, {"state": "running"})
        (self.run.attempt(0).path / "nodes").mkdir(parents=True)
        self.pace = Pace([self.run], lambda: self.now)

    def asks(self, seconds: int, beats_every: float | None = None) -> list[int]:
        """When Slurm is asked within so many seconds; a node's heartbeat is replaced all the while."""
        asked = []
        for turn in range(seconds * 5):
            self.now = round(self.now + 0.2, 1)
            if beats_every is not None and turn % int(5 * beats_every) == 0:
                alive = self.run.attempt(0).path / "nodes" / "alive-000.json"
                alive.unlink(missing_ok=True)
                alive.with_name(f"{turn}").touch()
                alive.with_name(f"{turn}").rename(alive)
            if self.pace.is_due():
                asked.append(round(self.now))
        return asked


def test_while_heartbeats_advance_slurm_is_asked_once_a_minute(tmp_path: Path) -> None:
    asked = Follower(tmp_path).asks(320, beats_every=2)
    assert len(asked) == 5 and all(50 <= b - a <= 70 for a, b in itertools.pairwise(asked))


def test_without_a_sign_of_life_the_pace_falls_to_once_a_minute(tmp_path: Path) -> None:
    asked = Follower(tmp_path).asks(300)
    assert asked[:4] == [5, 15, 35, 75] and len(asked) == 7


def test_heartbeats_that_cease_are_asked_about_at_once_and_so_is_another_state(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.asks(62, beats_every=2)
    ceased = follower.now
    assert follower.asks(60)[0] - ceased <= 40
    follower.asks(200)
    replace_json(follower.run.state, {"state": "interrupted"})
    changed = follower.now
    assert follower.asks(60)[0] - changed <= 6
