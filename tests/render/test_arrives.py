"""What a user writes reaches the process byte for byte, through a real bash, or is refused. It never runs."""

from __future__ import annotations

import base64
import shlex
import string
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.render.quote import RenderError
from launcher.render.values import Target
from launcher.schedulers.runpod.scripts import _args
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.variables import travelling
from tests.render import hostile_values, stubs
from tests.render.run import render_run

SLURM = {"name": "s", "scheduler": "slurm", "max_nodes": 4, "slurm": {"signal_seconds": 1}}
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def job(**fields: object) -> Job:
    return Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"], **fields})


def bash(script: Path, stub: stubs.Stubs, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", str(script)], env=stub.env(**env), cwd=cwd, capture_output=True, timeout=240
    )


def user_argv(argv: list[bytes]) -> list[bytes]:
    """What a rank runs. torchrun substitutes in arguments as string.Template does."""
    if b"launcher.supervise.local_ranks" in argv:
        assert argv[:2] == [b"-m", b"launcher.supervise.local_ranks"] and argv[3] == b"--"
        return argv[4:]
    rest = argv[argv.index(b"--no-python") + 2 :]
    rest = [string.Template(item.decode()).safe_substitute(local_rank="0").encode() for item in rest]
    assert rest[:3] == [b"-m", b"launcher.supervise.worker", b"--"]
    return rest[3:]


@pytest.mark.slow
@FEW
@given(
    name=hostile_values.names,
    arguments=st.lists(hostile_values.texts, max_size=4),
    env=st.dictionaries(hostile_values.variables, hostile_values.texts, max_size=3),
    cluster_env=st.dictionaries(hostile_values.variables, hostile_values.texts, max_size=1),
    folders=st.lists(hostile_values.folders, min_size=3, max_size=3, unique=True),
    torchrun=st.booleans(),
)
def test_arguments_environment_and_paths_arrive_through_start_sh(
    name: str,
    arguments: list[str],
    env: dict[str, str],
    cluster_env: dict[str, str],
    folders: list[str],
    torchrun: bool,
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        stub = stubs.make(folder / "stubs")
        stub.show_gpus(1)
        run_dir, workdir, python_dir = (folder / str(i) / part for i, part in enumerate(folders))
        workdir.mkdir(parents=True)
        python_dir.mkdir(parents=True)
        (python_dir / "python").symlink_to(stub.python)
        try:
            target = Target(
                job=job(name=name, command=["prog", *arguments], env=env, resources={"gpus_per_node": 1}),
                cluster=Cluster.model_validate(
                    {
                        "name": "local",
                        "scheduler": "local",
                        "env": {n: v for n, v in cluster_env.items() if n != "PATH"},
                        "node": {"numa_binding": "node" if torchrun else None},
                    }
                ),
                run_id="run",
                run_dir=str(run_dir),
                workdir=str(workdir),
                python=str(python_dir / "python"),
                nodes=1,
                ranks_per_node=1,
            )
            (start,) = render_run(target)
        except (ValidationError, RenderError) as error:
            event(f"refused: {type(error).__name__}")
            return
        script = folder / "start.sh"
        script.write_text(start.text, encoding="utf-8", newline="")
        done = bash(script, stub, folder)
        assert done.returncode == 0, done.stderr
        assert (b"--no-python" in stub.python_argv()) == torchrun
        assert user_argv(stub.python_argv()) == [b"prog", *(a.encode() for a in arguments)]
        seen = stub.python_env()
        for key, value in {**target.cluster.env, **travelling(env)}.items():
            assert seen[key.encode()] == value.encode()
        assert seen[b"LAUNCHER_RUN_DIR"] == str(run_dir).encode()
        assert seen[b"PWD"] == str(workdir).encode()
        assert not list(folder.rglob("PWNED*"))


def slurm_reads(script: str) -> list[str]:
    """The options sbatch finds in a script: `_get_argument` of Slurm's sbatch/opt.c, written again."""
    options = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            line = line[len("#SBATCH") :].replace("packjob", " " * 7).replace("hetjob", " " * 6)
            word, rest = _one_argument(line.lstrip(" "))
            assert not rest.strip(), f"sbatch would refuse: Invalid directive found in batch script: {rest}"
            options.append(word)
    return options


def _one_argument(line: str) -> tuple[str, str]:
    word, quote, escaped, at = "", "", False, 0
    # The blank ends the argument before the backslash in front of it is looked at.
    while at < len(line) and (quote or line[at] not in " \t\r\v\f"):
        char = line[at]
        at += 1
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "'\"":
            quote = char
        elif char == "#":
            return word, ""
        else:
            word += char
    assert not quote, "sbatch would refuse: Unmatched quote"
    return word, line[at:]


@FEW
@given(
    name=hostile_values.names,
    folder_name=hostile_values.folders,
    account=hostile_values.texts,
    mount=hostile_values.folders,
)
def test_names_and_paths_arrive_through_sbatch_srun_and_apptainer(
    name: str, folder_name: str, account: str, mount: str
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        stub = stubs.make(folder / "stubs")
        run_dir = folder / folder_name
        cluster = {
            **SLURM,
            "slurm": {"account": account, "signal_seconds": 1},
            "container": {
                "runtime": "apptainer",
                "image": "i.sif",
                "mounts": {f"/host/{mount}": f"/in/{mount}"},
            },
        }
        try:
            target = Target(
                job=job(name=name),
                cluster=Cluster.model_validate(cluster),
                run_id=name,
                run_dir=str(run_dir),
                workdir=str(folder),
                python=str(stub.python),
                nodes=1,
                ranks_per_node=1,
            )
            files = {file.path: file.text for file in render_run(target)}
        except (ValidationError, RenderError) as error:
            event(f"refused: {type(error).__name__}")
            return
        (run_dir / "scripts").mkdir(parents=True)
        for path, content in files.items():
            (run_dir / "scripts" / path).write_text(content, encoding="utf-8", newline="")
        options = slurm_reads(files["job.sbatch"])
        assert f"--job-name={name}" in options
        assert f"--account={account}" in options
        assert f"--output={str(run_dir).replace('%', '%%')}/slurm-%j.out" in options
        script = run_dir / "scripts" / "job.sbatch"
        script.with_name("check-node.sh").write_text("echo n1 ok\n")  # neither image nor mounts are here
        done = bash(script, stub, folder, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1")
        assert done.returncode == 0, done.stderr
        # srun -> apptainer exec --bind ... image -> on-node.sh -> the supervisor
        argv = ["-m", "launcher.supervise", str(run_dir), "--stop-file", f"{run_dir}/slurm-7-0.stop"]
        assert stub.python_argv() == [item.encode() for item in argv]
        called = stub.called("apptainer")
        bind = called[called.index(b"--bind") + 1].decode()
        assert bind == f"/host/{mount}:/in/{mount},{run_dir}:{run_dir},{folder}:{folder}"
        assert not list(folder.rglob("PWNED*"))


def test_every_dollar_survives_the_substitution_of_torchrun() -> None:
    api = pytest.importorskip("torch.distributed.elastic.utils.api")
    values = ["$", "$$", "$$$", "${local_rank}", "$local_rank", "a$b", "${", "$(id)"]
    doubled = [value.replace("$", "$$") for value in values]
    assert api.macros.substitute(doubled, "3") == values


@FEW
@given(script=hostile_values.texts)
def test_the_start_script_of_a_pod_travels_in_plain_characters(script: str) -> None:
    args = _args(script, "run-1")
    prefix, rest = args.split("echo ", 1)
    encoded, suffix = rest.split(" ", 1)
    assert (prefix, suffix) == ("bash -c '", _args("", "run-1").split("echo  ", 1)[1])
    assert base64.b64decode(encoded).decode() == script
    assert shlex.split(args)[:2] == ["bash", "-c"] and len(shlex.split(args)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_dir": "/a\\b"}, "backslash"),
        ({"run_dir": "/a\nb"}, "control character"),
        ({"run_dir": "relative"}, "not an absolute path"),
        ({"workdir": "/a\0b"}, "NUL"),
        ({"python": "/a\udc80"}, "surrogate"),
    ],
)
def test_a_path_that_no_script_can_carry_is_refused_with_the_reason(
    change: dict[str, str], message: str
) -> None:
    fields = {"run_dir": "/r", "workdir": "/w", "python": "python3", **change}
    with pytest.raises(RenderError, match=message):
        render_run(
            Target(
                job=job(),
                cluster=Cluster.model_validate(SLURM),
                run_id="r",
                nodes=1,
                ranks_per_node=1,
                **fields,
            )
        )
