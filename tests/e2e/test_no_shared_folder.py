"""Two hosts that share no folder: two supervisors, each with a run directory of its own, and one TCP
connection between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.rundir.stop import read_stop_request
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.process import end_processes, processes_of
from tests.e2e.test_handover import _flat, resumed
from tests.e2e.test_together import SUPERVISE, own_address
from tests.lab import HELD, HELD_JOB, PATIENCE, Lab, events, metrics, verdicts, wait_for

pytestmark = pytest.mark.e2e

STEPS, BATCH = 8, 32
TOKEN = "5d1e0a3b8a9f2b7c"
DDP = {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 8}
FSDP = {"sharding": "fsdp", "precision": "fp32", "micro_batch_size": 8}


class Pair:
    """A run whose two nodes have a folder each. What a user looks at is node 0's."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.nodes = [RunDir(lab.folder / f"host-{node}" / name) for node in (0, 1)]
        self.run, self.other = self.nodes
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self._starts = 0

    def render(self, *faults: list[Any], ranks: int = 1, **fields: Any) -> None:
        lab = self.lab
        shutil.copy(Path(__file__).with_name("faults.py"), lab.folder / "faults.py")
        (lab.folder / "clusters").mkdir(exist_ok=True)
        (lab.folder / "clusters/pair.yaml").write_text(
            f"name: pair\nscheduler: ssh\nssh: {{hosts: [one, two]}}\n"
            f"paths: {{python: {json.dumps(sys.executable)}, runs: {lab.folder / 'host-0'}}}\n"
        )
        base = {
            "task": "faults:Faulty",
            "args": {"faults": list(faults)},
            "steps": STEPS,
            "batch": {"global": BATCH},
            "train": {"checkpoint_every": None, "lr": 1e-2, **fields.pop("train", {})},
            "recipe": DDP,
            "resources": {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": ranks},
        }
        done = lab.cli(
            "render", str(lab.job(**{**base, **fields})), "-c", "pair", "--out", str(self.run.path)
        )
        assert done.returncode == 0, done.stderr
        about = self.run.read_about()
        code = Path(about.workdir)  # as a submission would have sent it
        code.parent.mkdir(parents=True, exist_ok=True)
        if not code.is_symlink():
            code.symlink_to(lab.folder)
        replace_json(self.run.run, {**about.as_json(), "apart": True, "hosts": ["one", "two"]})
        shutil.copytree(self.run.path, self.other.path)
        # Ranks follow the nodes, whichever address comes first where they are sorted.
        script = self.other.scripts / "start.sh"
        script.write_text(
            script.read_text().replace("\nis_host=false\n", "\nlocal_addr=0.0.0.1\nis_host=false\n")
        )

    def start(self) -> None:
        self._starts += 1
        base = str(61000 + (os.getpid() + 37 * self._starts + 400 * len(self.run.id)) % 4000)
        self.supervisors = []
        for node, run in enumerate(self.nodes):
            command = [
                sys.executable,
                "-c",
                SUPERVISE,
                str(run.path),
                "--nodes",
                "2",
                "--node-rank",
                str(node),
            ]
            command += ["--rendezvous", own_address(), "--port-base", base, "--secrets-on-stdin"]
            log = run.path / ("supervisor.log" if node == 0 else "supervisor.01.log")
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    command, env=self.lab.environ, stdin=subprocess.PIPE, stdout=output, stderr=output
                )
            assert process.stdin is not None
            process.stdin.write(f"{{}}\n{TOKEN}\n".encode())
            process.stdin.close()
            self.supervisors.append(process)

    def wait(self, *codes: int, timeout: float = 2 * PATIENCE) -> None:
        found = [one.wait(timeout) for one in self.supervisors]
        assert found == list(codes), self.said()
        assert self.run.read_state().state not in ("running", "submitted"), self.said()

    def said(self) -> str:
        return "\n".join(self.lab.all_logs(run) + self.log(run) for run in self.nodes)

    def log(self, run: RunDir) -> str:
        return "".join(file.read_text() for file in sorted(run.path.glob("supervisor*.log")))

    def end(self) -> None:
        for process in self.supervisors:
            if process.poll() is None:
                process.kill()
        for run in self.nodes:
            end_processes(lambda path=run.path: processes_of(path), grace=0)


@pytest.fixture
def pair(lab: Lab) -> Iterator[Callable[[str], Pair]]:
    made: list[Pair] = []

    def make(name: str) -> Pair:
        made.append(Pair(lab, name))
        return made[-1]

    yield make
    for one in made:
        one.end()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert len(one) > 10 and one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def on_one_host(lab: Lab, **fields: Any) -> dict[str, torch.Tensor]:
    """The same two ranks where nothing is apart."""
    shutil.copy(Path(__file__).with_name("faults.py"), lab.folder / "faults.py")
    base = {"task": "faults:Faulty", "steps": STEPS, "batch": {"global": BATCH}}
    done = lab.cli("run", str(lab.job(**{**base, **fields})), timeout=280)
    run = lab.newest()
    assert done.returncode == 0, done.stdout + done.stderr + lab.all_logs(run)
    return final(lab, run)


def final(lab: Lab, *nodes: RunDir) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds, whichever host has it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    together = lab.folder / f"together-{nodes[0].id}"
    for run in nodes[::-1]:  # node 0's metadata
        shutil.copytree(run.checkpoints / f"step-{STEPS:08d}", together, dirs_exist_ok=True)
    dcp_to_torch_save(together, together / "whole.pt")
    whole: dict[str, Any] = {"whole": torch.load(together / "whole.pt", weights_only=False)}
    for rank in (0, 1):
        own = torch.load(together / f"rank-{rank:03d}.pt")
        whole[f"rank {rank}"] = [own["rng"]["torch"], own["buffers"]]
    return dict(_flat(whole))


@pytest.mark.slow
def test_memory_that_runs_out_costs_no_step_on_hosts_that_share_no_folder(
    lab: Lab, pair: Callable[[str], Pair]
) -> None:
    ours = pair("ours")
    ours.render([0, 1, "backward", 5], recipe=DDP)
    ours.start()
    ours.wait(0, 0)
    first, last = verdicts(ours.run)
    assert (first["failure"], first["rank"], first["node"]) == ("gpu-oom", 1, 1), ours.said()
    assert (first["phase"], first["step"], last["failure"]) == ("backward", 5, "succeeded")
    assert [event["step"] for event in events(ours.run, "handover")] == [4]
    assert resumed(ours.run) == [(4, "shared-memory")]
    assert [line["step"] for line in metrics(ours.run)] == list(range(1, STEPS + 1)), "each step once"
    for node, run in enumerate(ours.nodes):
        assert not handover_folder(run, node).parent.exists() and not processes_of(run.path)
    theirs = on_one_host(
        lab,
        args={"faults": [[0, 0, "forward", 5]]},
        train={"checkpoint_every": 2, "lr": 1e-2},
        recipe=DDP,
    )
    assert_same(final(lab, *ours.nodes), theirs)
    # What node 1 wrote is read through the CLI at node 0, as if the folder were shared.
    assert "out of memory, as asked for: backward" in lab.cli("why", str(ours.run.path)).stdout
    assert (
        "as asked for: backward"
        in lab.cli("logs", str(ours.run.path), "--attempt", "0", "--rank", "1").stdout
    )
    name = "attempts/001/memory/rank-001.jsonl"
    assert (ours.run.path / name).read_bytes() == (ours.other.path / name).read_bytes() != b""
    # Replicas are on every host: node 0 has all that an export needs.
    said = lab.cli("export", str(ours.run.path), "--to", str(lab.folder / "weights"))
    assert said.returncode == 0, said.stderr


@pytest.mark.thorough
def test_a_host_that_is_told_to_stop_has_all_ranks_write_a_checkpoint_first(
    lab: Lab, pair: Callable[[str], Pair]
) -> None:
    ours = pair("told")
    ours.render(steps=100_000)
    ours.start()
    wait_for(lambda: len(metrics(ours.run)) > 3, "a few steps")
    ours.supervisors[1].send_signal(signal.SIGTERM)
    code = EXIT_CODES["preempted"]
    ours.wait(code, code)
    (verdict,) = verdicts(ours.run)
    assert verdict["failure"] == "preempted" and "a checkpoint was written" in verdict["reason"]
    stopped = events(ours.run, "checkpoint")[-1]["step"]
    assert all((run.checkpoints / f"step-{stopped:08d}").exists() for run in ours.nodes)


@pytest.mark.thorough
def test_a_cancel_while_another_host_has_to_leave_changes_the_reason_and_costs_no_checkpoint(
    lab: Lab, pair: Callable[[str], Pair]
) -> None:
    ours = pair("left")
    lab.script(HELD, "held.py")
    ours.render(**HELD_JOB)
    ours.start()
    wait_for(lambda: all((run.path / "held").exists() for run in ours.nodes), "first step")
    ours.supervisors[1].send_signal(signal.SIGTERM)
    stop = ours.run.attempt(0).stop
    wait_for(lambda: read_stop_request(stop).reason == "preempted", "word of it at node 0")
    ours.run.cancel.write_text("1\n")
    wait_for(lambda: len(events(ours.run, "stopping")) == 3, "both hosts to hear of the cancel")
    for run in ours.nodes:
        (run.path / "go").touch()
    code = EXIT_CODES["cancelled"]
    ours.wait(code, code)
    assert verdicts(ours.run)[0]["reason"] == "cancelled by the user; a checkpoint was written", ours.said()
    assert all((run.checkpoints / "step-00000001").exists() for run in ours.nodes)


@pytest.mark.thorough
def test_a_killed_rank_and_a_cancelled_run_go_on_from_the_parts_that_each_host_has(
    lab: Lab, pair: Callable[[str], Pair]
) -> None:
    ours = pair("parts")
    faults = [[0, 1, "killed", 5], [1, 0, "cancelled", 5]]
    ours.render(*faults, recipe=FSDP, train={"checkpoint_every": 2, "async_checkpoints": True})
    ours.start()
    code = EXIT_CODES["cancelled"]
    ours.wait(code, code)
    assert [one["failure"] for one in verdicts(ours.run)] == ["unknown", "cancelled"], ours.said()
    stopped = events(ours.run, "checkpoint")[-1]["step"]
    # The save of step 4 has waited for that of step 2, and may be cut short itself.
    assert resumed(ours.run) in ([(2, "checkpoint")], [(4, "checkpoint")]) and stopped in (5, 6)
    for run in ours.nodes:
        assert sorted(path.name for path in run.checkpoints.iterdir())[-1] == f"step-{stopped:08d}"
        assert len(list((run.checkpoints / f"step-{stopped:08d}").glob("rank-*.pt"))) == 1
    ours.run.cancel.unlink()
    ours.start()
    ours.wait(0, 0)
    assert resumed(ours.run)[-1] == (stopped, "checkpoint")
    theirs = on_one_host(lab, args={"faults": []}, train={"checkpoint_every": 2, "lr": 1e-2}, recipe=FSDP)
    assert_same(final(lab, *ours.nodes), theirs)
    said = lab.cli("export", str(ours.run.path), "--to", str(lab.folder / "weights"))
    assert (
        said.returncode == 4 and "lacks __1_0.distcp" in said.stderr and "these are of node 1" in said.stderr
    )
    shutil.copytree(
        ours.other.checkpoints / f"step-{STEPS:08d}",
        ours.run.checkpoints / f"step-{STEPS:08d}",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(".metadata", "complete.json"),
    )
    said = lab.cli("export", str(ours.run.path), "--to", str(lab.folder / "weights"))
    assert said.returncode == 0, said.stderr


@pytest.mark.thorough
def test_a_host_that_drops_out_ends_the_run_and_parts_that_are_missing_are_named(
    lab: Lab, pair: Callable[[str], Pair]
) -> None:
    ours = pair("lost")
    ours.render([0, 1, "node lost", 5], recipe=FSDP, train={"checkpoint_every": 2}, retries={"same": 0})
    (ours.other.checkpoints / "step-00000002").touch()  # so one host cannot publish its part, the other can
    ours.start()
    ours.wait(EXIT_CODES["node-failed"], -9)
    (verdict,) = verdicts(ours.run)
    assert (verdict["failure"], verdict["node"]) == ("node-failed", 1), ours.said()
    for run in ours.nodes:
        wait_for(lambda run=run: not processes_of(run.path), "end of every rank")
    (failed,) = events(ours.run, "checkpoint-failed")
    assert failed["step"] == 2 and "could not be written: two: " in failed["reason"]
    assert sorted(path.name for path in ours.run.checkpoints.iterdir()) == ["step-00000004"]
    newest = max(path.name for path in ours.other.checkpoints.iterdir())
    away = ours.other.path / "away"
    (ours.other.checkpoints / newest).rename(away)
    ours.start()
    ours.wait(17, 17)
    said = lab.cli("why", str(ours.run.path)).stdout.replace("\n", " ")
    assert f"{newest} was complete, but two has lost its part" in said, said
    away.rename(ours.other.checkpoints / newest)
    (ours.other.checkpoints / newest / "__1_0.distcp").rename(away)
    ours.start()
    ours.wait(17, 17)
    said = lab.cli("why", str(ours.run.path)).stdout
    assert "two lacks __1_0.distcp of " in said and "these are of two" in said, said
    away.rename(ours.other.checkpoints / newest / "__1_0.distcp")
    ours.start()
    ours.wait(0, 0)
    assert resumed(ours.run)[-1] == (4, "checkpoint")


@pytest.mark.thorough
def test_a_full_disk_of_one_host_costs_the_checkpoints_of_both_and_not_the_training(
    pair: Callable[[str], Pair],
) -> None:
    ours = pair("full")
    ours.render(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 128, "heads": 2, "context": 32},
        train={"checkpoint_every": 4},
        recipe=FSDP,
    )
    disk = ours.other.checkpoints
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.strip()}")
    try:
        ours.start()
        ours.wait(EXIT_CODES["disk-full"], EXIT_CODES["disk-full"])
        left = [list(run.checkpoints.iterdir()) for run in ours.nodes]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    (failed,) = events(ours.run, "checkpoint-failed")
    assert failed["step"] == 4 and "two: No space left on device: it takes" in failed["reason"]
    assert [line["step"] for line in metrics(ours.run)] == list(range(1, STEPS + 1)) and left == [[], []]
    assert "ran out of disk space" in verdicts(ours.run)[-1]["reason"]
