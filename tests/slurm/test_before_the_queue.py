"""A real cluster: what it is asked before a job is in its queue, and the options of pyxis by a stub of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from launcher.planning.plan import make_plan
from launcher.schedulers.login import LocalLogin, ask
from launcher.schedulers.slurm.checks import Findings, problems
from launcher.schedulers.slurm.records import look_up
from launcher.spec.cluster import Cluster as Profile
from launcher.spec.job import Job
from launcher.spec.load import load_cluster
from tests.slurm.cluster import Cluster, slurm_version
from tests.slurm.lab import SlurmLab

NODE = {"gpu": {"type": "A100 40GB", "count": 8, "memory": "39GiB"}, "cpus": 16}


@pytest.fixture
def here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> LocalLogin:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    return LocalLogin()


def checked(
    here: LocalLogin,
    script: str,
    slurm: dict[str, object],
    times: tuple[str | None, ...] = ("5m",),
    **more: object,
) -> Findings:
    profile = Profile.model_validate(
        {"name": "c", "scheduler": "slurm", "max_nodes": 99, "node": NODE, "slurm": slurm, **more}
    )
    jobs = [(f"time={time}", job := limited_to(time), make_plan(job, profile)) for time in times]
    return problems(here, profile, jobs, f"#!/bin/sh\n{script}\nhostname\n")


def limited_to(time: str | None) -> Job:
    resources = {"gpus_per_node": 1, "cpus_per_node": 2, "time": time}
    return Job.model_validate(
        {"name": "j", "command": ["true"], "batch": {"global": 8}, "resources": resources}
    )


def test_a_warning_about_some_runs_of_a_sweep_names_them(here: LocalLogin) -> None:
    found = checked(here, "#SBATCH --nodes=1", {"partition": "main"}, times=("5m", None, "6m"))
    [warning] = found.warnings
    assert warning.startswith("time=None: no resources.time")


def test_a_job_that_fits_passes_also_from_inside_of_another_job(
    here: LocalLogin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "99999999")
    assert checked(here, "#SBATCH --nodes=1", {"partition": "main"}) == Findings()


def test_what_only_sbatch_knows_is_refused_in_its_words(here: LocalLogin) -> None:
    found = checked(here, "#SBATCH --nodes=1 --constraint=a&b", {"partition": "main", "constraint": "a&b"})
    assert found.refusals and found.refusals[0].startswith("sbatch --test-only: ")


def test_places_are_looked_at_in_the_same_round_trip(here: LocalLogin, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    container = {"runtime": "pyxis", "image": f"{tmp_path}/none.sqsh", "mounts": {"/nowhere": "/x"}}
    paths = {"runs": f"{tmp_path}/file/runs"}
    found = checked(here, "", {"partition": "main"}, container=container, paths=paths)
    assert found.refusals == (f"paths.runs: {tmp_path}/file/runs cannot be written to",)
    assert [one.partition(":")[0] for one in found.warnings] == [
        "container.image",
        "container.mounts",
        "container.runtime",
    ]


def test_a_round_trip_tells_of_a_job_from_start_to_end(here: LocalLogin, slurm_lab: SlurmLab) -> None:
    job = slurm_lab.sbatch("exit 12", "--nodes=1", "--comment=a|b", "--job-name=x ExitCode=9:0")
    slurm_lab.accounted(job)
    record = look_up(partial(ask, here), [job]).get(job)
    assert record is not None
    assert (record.state, record.exit_code, record.comment) == ("FAILED", 12, "a|b")


def test_the_detected_profile_is_the_clusters(slurm_lab: SlurmLab) -> None:
    done = slurm_lab.cli("clusters", "detect", "--partition", "short")
    assert done.returncode == 0, done.stderr
    file = slurm_lab.folder / "detected.yaml"
    file.write_text(done.stdout)
    profile = load_cluster(file)
    shape = slurm_lab.cluster.shape
    assert profile.slurm is not None and profile.slurm.partition == "short"
    assert profile.node.cpus == shape.cpus and profile.gpus_per_node == shape.gpus_per_node
    assert "at most 10m for a job" in done.stdout and "--partition main" in done.stderr


@pytest.fixture
def pyxis(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """The stub, loaded by srun and by the nodes, with an image that sets variables of its own."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stub of pyxis")
    if os.geteuid() != 0:
        pytest.skip("plugstack.conf is the cluster's, which another user owns")
    code = sum(number << shift for number, shift in zip(slurm_version(), (16, 8, 0), strict=True))
    library = tmp_path / "pyxis_stub.so"
    source = Path(__file__).with_name("pyxis_stub.c")
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DVERSION={code}", "-o", library, source], check=True)
    config = cluster.folder / "plugstack.conf"
    config.write_text(f"optional {library} TOKEN=image PYTHONNOUSERSITE= OTHER=image\n")
    yield
    config.write_text("")


def test_srun_takes_the_options_for_pyxis_and_our_variables_reach_the_ranks(
    pyxis: None, slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    profile = slurm_lab.folder / "lab.yaml"
    fields = YAML(typ="safe").load(profile)
    image = {"runtime": "pyxis", "image": "my.sqsh", "mounts": {"/usr": "/usr"}}
    YAML().dump(fields | {"container": image}, profile)
    (slurm_lab.folder / "my.sqsh").touch()
    slurm_lab.environ["TOKEN"] = "ours"
    slurm_lab.job(
        task=None,
        command=["sh", "-c", f"env >{tmp_path}/seen"],
        secrets=["TOKEN"],
        resources={"nodes": 1, "ranks_per_node": 1},
        recipe={"sharding": "none"},
    )
    run = slurm_lab.submit("job.yaml")
    assert slurm_lab.wait(run)["state"] == "succeeded"
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen["TOKEN"] == "ours" and seen["OTHER"] == "image" and seen["PYTHONNOUSERSITE"] == "1"
    assert seen["STUB_IMAGE"] == f"{slurm_lab.folder}/my.sqsh" and seen["STUB_ENTRYPOINT"] == "given"
    assert seen["STUB_MOUNTS"].startswith("/usr:/usr,") and str(run.path) in seen["STUB_MOUNTS"]
    assert sys.executable in (run.path / "scripts" / "on-node.sh").read_text()
