"""No name of a variable of the job breaks a script: it arrives, or the job is refused with the reason.

The names are all words of all rendered scripts: a variable that a script gets tomorrow is among them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.render.quote import RenderError
from launcher.render.values import Target
from launcher.rundir.layout import RunDir
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.variables import split, travelling, usable_name
from launcher.supervise.attempt import NodePlace, start
from launcher.supervise.worker import Worker
from tests.lab import wait_for
from tests.render import stubs, test_sbatch
from tests.render.examples import GOLDEN
from tests.render.run import render_run
from tests.render.test_on_pod import Api, Pod, pod
from tests.render.test_start import SLURM, render
from tests.render.test_start import run as run_start

__all__ = ["pod"]
WORDS = sorted(
    {
        word
        for pattern in ("*.sh", "*.sbatch")
        for file in GOLDEN.rglob(pattern)
        for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", file.read_text())
    }
)
LEGITIMATE = [
    "PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "HOME",
    "CDPATH",
    "TMPDIR",
]
LEGITIMATE += [
    "python",
    "argv",
    "worker",
    "torchrun",
    "rendezvous",
    "http_proxy",
    "OMP_NUM_THREADS",
    "SLURM_JOB_NAME",
]
REFUSED = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
REFUSED += [
    "MASTER_PORT",
    "ROLE_NAME",
    "TORCHELASTIC_RUN_ID",
    "LAUNCHER_RUN_DIR",
    "LAUNCHER_ENV_X",
    "_argv",
    "_python",
]
REFUSED += [
    "IFS",
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "BASHOPTS",
    "SHELLOPTS",
    "UID",
    "EUID",
    "PPID",
    "BASH_ENV",
    "BASH",
]
REFUSED += [
    "RANDOM",
    "SECONDS",
    "FUNCNEST",
    "EXECIGNORE",
    "GLOBIGNORE",
    "BASH_FUNC_x%%",
    "a b",
    "",
    "1A",
    "a=b",
    "é",
]


def usable(names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(usable_name(name))
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_arrive_is_refused_by_name_everywhere(name: str) -> None:
    job = {"name": "j", "batch": {"global": 8}, "command": ["true"]}
    cluster = {"name": "c", "scheduler": "local"}
    for model, data in (
        (Job, {**job, "env": {name: "x"}}),
        (Job, {**job, "secrets": [name]}),
        (Job, {**job, "secrets": [{"name": "A", "env": name}]}),
        (Cluster, {**cluster, "env": {name: "x"}}),
        (Cluster, {**cluster, "network": {"env": {name: "x"}}}),
    ):
        with pytest.raises(ValidationError) as error:
            model.model_validate(data)
        said = error.value.errors()[0]["msg"]
        assert f"{name} cannot be set: " in said or f"{name!r} is not a variable name" in said


def test_what_bash_does_not_pass_on_is_refused() -> None:
    """Every variable that bash itself knows, tried: one whose value does not arrive is among the refused."""
    script = 'for n in $(compgen -v) _ IFS POSIXLY_CORRECT COMP_WORDS; do printf "%s\\n" "$n"; done'
    known = subprocess.run(
        ["bash", "-c", script], env={}, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in {*known, *LEGITIMATE}:
        env = {name: "1 x", "PATH": os.environ["PATH"]} if name != "PATH" else {}
        text = f'export {name}="1 x"; exec /usr/bin/env -0'
        ways = [["-c", "/usr/bin/env -0; :"], ["-c", text]]
        seen = [subprocess.run(["bash", *way], env=env, capture_output=True).stdout for way in ways]
        if name != "PATH" and not all(f"{name}=1 x".encode() in one.split(b"\0") for one in seen):
            with pytest.raises(ValueError, match=f"^{name} cannot be set"):
                usable_name(name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_word_of_a_script_reaches_the_rank_as_variable_and_as_secret(tmp_path: Path, ranks: int) -> None:
    """Through the supervisor's own start, real bash, real torchrun and the real worker."""
    names = usable(sorted({*WORDS, *LEGITIMATE}))
    assert {"python", "argv", "PATH", "nodes", "PYTHONPATH"} <= set(names) and len(names) > 300
    env = {name: f"env {name}" for name in names[::2]}
    secrets = {name: f"secret {name}" for name in names[1::2]}
    seen = tmp_path / "seen"
    command = ["/bin/cp", "/proc/self/environ", str(seen)]
    run = RunDir(tmp_path / "run")
    job = {"name": "j", "batch": {"global": 8}, "command": command, "env": env, "secrets": list(secrets)}
    target = Target(
        job=Job.model_validate(job),
        cluster=Cluster.model_validate({"name": "local", "scheduler": "local"}),
        run_id="run",
        run_dir=str(run.path),
        workdir=str(tmp_path),
        python=sys.executable,
        nodes=1,
        ranks_per_node=ranks,
    )
    run.scripts.mkdir(parents=True)
    (run.scripts / "start.sh").write_text(render_run(target)[0].text)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    ended = start(run, attempt, NodePlace(), secrets, sends_sigterm=True).wait(lambda: None)
    assert ended.exit_code == 0, attempt.torchrun_log(0).read_text()
    found = dict(item.split(b"=", 1) for item in seen.read_bytes().split(b"\0")[:-1])
    for name, value in {**env, **secrets}.items():
        assert found.get(name.encode()) == value.encode(), name
    assert not any(name.startswith(b"LAUNCHER_ENV_") for name in found)
    assert found[b"WORLD_SIZE"] == str(ranks).encode()


def test_any_word_of_a_script_can_be_a_variable_of_the_profile(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    names = [name for name in usable(WORDS) if name not in ("PATH", "HOME") and not name.startswith("STUB_")]
    cluster = SLURM.model_copy(update={"env": {name: f"of {name}" for name in names}})
    code, errors = run_start(render(tmp_path, stub, cluster), stub)
    assert code == 0, errors
    env = stub.python_env()
    missing = [name for name in names if env.get(name.encode()) != f"of {name}".encode()]
    assert missing == [] or set(missing) <= {"NCCL_DEBUG"}  # which its network sets
    assert stub.python_argv()[-1] == b"true"


OUTSIDE = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|RUNPOD|STUB|APPTAINERENV|PYTHON|LD|LC|CURL)_?.*|PATH|HOME|LAUNCHER_.*"
)


def test_the_batch_script_changes_no_variable_that_it_was_submitted_with(tmp_path: Path) -> None:
    """Secrets are among them."""
    stub = stubs.make(tmp_path / "stubs")
    given = {name: f"of {name}" for name in usable(WORDS) if not OUTSIDE.fullmatch(name)}
    script = test_sbatch.write(tmp_path, stub, resources={"nodes": 2})
    more = {"SLURM_JOB_NODELIST": "n1,n2", "STUB_HOSTS": test_sbatch.HOSTS, "STUB_ROUTE": "10.0.0.1"}
    code, errors = test_sbatch.finish(test_sbatch.start(script, stub, **given, **more))
    assert code == 0, errors
    env = stub.python_env()
    assert [name for name, value in given.items() if env.get(name.encode()) != value.encode()] == []
    # A job that goes on is submitted by the script itself.
    stub = stubs.make(tmp_path / "again")
    script = test_sbatch.write(tmp_path / "two", stub)
    more = {"STUB_MODE": "wait-interrupted", "STUB_REQUEUE_EXIT": "1"}
    process = test_sbatch.start(script, stub, **given, **more)
    wait_for(stub.out.exists, "the supervisor")
    process.terminate()
    code, errors = test_sbatch.finish(process)
    handed_on = Path(f"{stub.out}.sbatch.env").read_bytes().split(b"\0")
    assert [name for name, value in given.items() if f"{name}={value}".encode() not in handed_on] == []


def test_the_script_of_a_pod_changes_no_variable_of_the_pod(pod: Pod) -> None:
    needed = ("NODE_RANK", "PRIMARY_ADDR", "PUBLIC_KEY")
    given = {
        name: f"of {name}" for name in usable(WORDS) if not OUTSIDE.fullmatch(name) and name not in needed
    }
    pod.start(Api(("DELETE", 204, "")), pod.target(), **given)
    pod.wait_for("the pod is ending")
    env = pod.stub.python_env()
    assert [name for name, value in given.items() if env.get(name.encode()) != value.encode()] == []


@pytest.mark.parametrize("name", ["PATH", "HOME", "LD_PRELOAD", "PYTHONPATH", "NODE_RANK", "RUNPOD_POD_ID"])
def test_a_secret_that_would_break_the_pod_is_refused(pod: Pod, name: str) -> None:
    with pytest.raises(RenderError, match=f"secret {name}: the pod itself needs this variable"):
        render_run(pod.target(secrets=[name]))
    assert render_run(pod.target(secrets=["RUNPOD_API_KEY"]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(
        st.one_of(
            st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True),
            st.sampled_from([*WORDS, *LEGITIMATE, *REFUSED]),
        ),
        max_size=8,
        unique=True,
    )
)
def test_any_name_reaches_the_rank_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("name")
    stub = stubs.make(folder / "stubs")
    env = {name: f"of {name}" for name in usable(names)}
    code, errors = run_start(render(folder, stub, env=env), stub)
    assert code == 0, errors
    _, job = split({name.decode(): value.decode() for name, value in stub.python_env().items()})
    assert job == env
    assert stub.python_argv()[-1] == b"true"


def test_a_stray_variable_of_launchers_own_reaches_no_rank(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, errors = run_start(render(tmp_path, stub), stub, LAUNCHER_ENV_STRAY="x", LAUNCHER_ATTEMPT="UNSET")
    assert (code, b"LAUNCHER_ENV_STRAY" in stub.python_env()) == (0, False), errors


def test_the_path_of_a_job_is_its_own(tmp_path: Path) -> None:
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0", "PATH": "/usr/bin"}
    bin_of_python = str(Path(sys.executable).parent)
    assert Worker(place, os.getppid())._environment()["PATH"] == f"{bin_of_python}:/usr/bin"
    mine = Worker({**place, **travelling({"PATH": "/mine"})}, os.getppid())
    assert mine._environment()["PATH"] == "/mine"
