"""start.sh under a stub of python: what starts the ranks, what it is told, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.render.quote import RenderError
from launcher.render.values import Target
from launcher.spec.cluster import Cluster, Network
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_SICK
from launcher.supervise.interface import addresses
from tests.render import stubs
from tests.render.run import render_run

SLURM = Cluster.model_validate(
    {
        "name": "s",
        "scheduler": "slurm",
        "max_nodes": 4,
        "slurm": {},
        "env": {"WHO": "cluster", "ONLY": "cluster"},
        "network": {"interface": "ib0", "env": {"NCCL_DEBUG": "INFO", "WHO": "network"}},
    }
)
RECIPE = Recipe(precision="bf16", optimizer="adamw", sharding="ddp", micro_batch_size=1, grad_accum=1)


def render(
    folder: Path, stub: stubs.Stubs, cluster: Cluster = SLURM, nodes: int = 1, **fields: object
) -> Path:
    recipe = fields.pop("recipe", None)
    job = Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"], **fields})
    target = Target(
        job=job,
        cluster=cluster,
        run_id="run",
        run_dir=str(folder / "run"),
        workdir=str(folder),
        python=str(stub.python),
        nodes=nodes,
        ranks_per_node=2,
        recipe=recipe if isinstance(recipe, Recipe) else None,
    )
    script = folder / "start.sh"
    script.write_text(render_run(target)[0].text)
    return script


def run(script: Path, stub: stubs.Stubs, **env: str) -> tuple[int, str]:
    attempt = {
        "LAUNCHER_RUN_DIR": str(script.parent / "run"),
        "LAUNCHER_RUN_ID": "run",
        "LAUNCHER_ATTEMPT": "3",
        "LAUNCHER_RENDEZVOUS_PORT": "61005",
    }
    env = {**attempt, "LAUNCHER_NODE_RANK": "0", **env}
    environ = {name: value for name, value in stub.env(**env).items() if value != "UNSET"}
    done = subprocess.run(["bash", str(script)], env=environ, capture_output=True, timeout=240, text=True)
    return done.returncode, done.stderr


def test_on_one_host_the_ranks_start_without_torchrun(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, errors = run(render(tmp_path, stub, command=["prog", "$$5"]), stub)
    assert code == 0, errors
    argv = [item.decode() for item in stub.python_argv()]
    assert argv == ["-m", "launcher.supervise.local_ranks", "2", "--", "prog", "$$5"]


def test_torchrun_on_one_host_gets_the_supervisors_port_and_an_id_of_its_own(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    stub.show_gpus(2)
    bound = with_node(numa_binding="node")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()  # one without --numa-binding
    script = render(tmp_path, stub, bound, resources={"gpus_per_node": 2})
    code, errors = run(script, stub, PYTHONPATH=str(tmp_path))
    assert code == 0 and "ranks are not bound" in errors
    argv = [item.decode() for item in stub.python_argv()]
    log_dir = f"{tmp_path}/run/attempts/003/torchrun/node-0"
    assert argv[0] == "-c" and "from torch.distributed.run import main" in argv[1]
    assert argv[2:] == [
        *["--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", log_dir],
        *["--rdzv-id", "run-3", "--nnodes", "1", "--node-rank", "0", "--rdzv-backend", "static"],
        *["--local-addr", "127.0.0.1", "--rdzv-endpoint", "127.0.0.1:61005", "--no-python", str(stub.python)],
        *["-m", "launcher.supervise.worker", "--", "true"],
    ]


def test_on_several_nodes_the_first_is_the_host_and_no_name_is_looked_up(tmp_path: Path) -> None:
    address = _own_address()
    stub = stubs.make(tmp_path / "stubs")
    script = render(tmp_path, stub, nodes=2)
    for rank, is_host in (("0", "true"), ("1", "false")):
        env = {"LAUNCHER_RENDEZVOUS_HOST": address, "LAUNCHER_RENDEZVOUS_PORT": "61007"}
        code, errors = run(script, stub, LAUNCHER_NODE_RANK=rank, **env)
        assert code == 0, errors
        argv = b" ".join(stub.python_argv()).decode()
        assert f"--nnodes 2 --rdzv-endpoint {address}:61007 --local-addr {address} " in argv
        assert f"--rdzv-backend c10d --rdzv-conf is_host={is_host} " in argv
        code, errors = run(script, stub, LAUNCHER_NODE_RANK=rank, LAUNCHER_APART="1", **env)
        assert code == 0, errors
        argv = b" ".join(stub.python_argv()).decode()
        assert f"--rdzv-backend static --node-rank {rank} " in argv


def _own_address() -> str:
    command = "hostname -I 2>/dev/null | tr ' ' '\\n' | grep -m1 -E '^[0-9.]+$' || true"
    address = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.strip()
    if not address or address.startswith("127."):
        pytest.skip("this machine has no address other than loopback")
    return address


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "no rendezvous: LAUNCHER_RENDEZVOUS_HOST is ''"),
        ({"LAUNCHER_ATTEMPT": "UNSET"}, "on several nodes set LAUNCHER_NODE_RANK"),
        (
            {"LAUNCHER_RENDEZVOUS_HOST": "localhost", "LAUNCHER_RENDEZVOUS_PORT": "61000"},
            "loopback address here: other nodes cannot reach it",
        ),
        (
            {"LAUNCHER_RENDEZVOUS_HOST": "no.such.host.invalid", "LAUNCHER_RENDEZVOUS_PORT": "61000"},
            "cannot reach",
        ),
    ],
)
def test_several_nodes_without_a_usable_rendezvous_are_refused_at_once(
    tmp_path: Path, env: dict[str, str], message: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, errors = run(render(tmp_path, stub, nodes=2), stub, **env)
    assert code == 78
    assert message in errors
    assert not stub.out.exists()


def test_by_hand_it_runs_attempt_0_and_says_so(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, errors = run(render(tmp_path, stub), stub, LAUNCHER_ATTEMPT="UNSET", LAUNCHER_RUN_DIR="/elsewhere")
    assert code == 0, errors
    assert "this is attempt 0" in errors
    env = stub.python_env()
    assert env[b"LAUNCHER_RUN_DIR"] == str(tmp_path / "run").encode()
    assert env[b"LAUNCHER_STOP_FILE"] == f"{tmp_path}/run/attempts/000/stop".encode()


def test_the_job_wins_over_the_network_and_the_network_over_the_cluster(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    cluster = SLURM.model_copy(update={"setup": ("export WHO=setup LATE=$ONLY",)})
    assert run(render(tmp_path, stub, cluster, env={"WHO": "job"}), stub)[0] == 0
    env = stub.python_env()
    assert (env[b"LAUNCHER_ENV_WHO"], env[b"WHO"]) == (b"job", b"setup")
    assert (env[b"ONLY"], env[b"LATE"], env[b"NCCL_DEBUG"]) == (
        b"cluster",
        b"cluster",
        b"INFO",
    )


def test_the_interface_counts_for_several_nodes_only(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    assert "IFNAME" not in render(tmp_path, stub).read_text()
    text = render(tmp_path, stub, nodes=2).read_text()
    assert "export NCCL_SOCKET_IFNAME='ib0'\nexport GLOO_SOCKET_IFNAME='ib0'\n" in text


def test_gloo_gets_the_interface_that_reaches_the_first_node_unless_somebody_has_chosen(
    tmp_path: Path,
) -> None:
    address = _own_address()
    name = next(name for name, one in addresses() if one == address)
    stub = stubs.make(tmp_path / "stubs")
    script = render(tmp_path, stub, SLURM.model_copy(update={"network": Network()}), nodes=2)
    env = {"LAUNCHER_RENDEZVOUS_HOST": address, "LAUNCHER_RENDEZVOUS_PORT": "61007"}
    assert run(script, stub, **env)[0] == 0
    assert stub.python_env()[b"GLOO_SOCKET_IFNAME"] == name.encode()
    assert run(script, stub, **env, GLOO_SOCKET_IFNAME="eth7", NCCL_SOCKET_IFNAME="eth8")[0] == 0
    chosen = stub.python_env()
    assert (chosen[b"GLOO_SOCKET_IFNAME"], chosen[b"NCCL_SOCKET_IFNAME"]) == (b"eth7", b"eth8")


def test_soft_limits_are_raised_as_far_as_the_host_allows(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = render(tmp_path, stub)
    (stub.bin / "python3").write_text(f"#!/bin/bash\nulimit -n >{tmp_path}/n; ulimit -l >{tmp_path}/l\n")
    script.write_text("ulimit -S -n 100; ulimit -H -n 500; ulimit -S -l 8\n" + script.read_text())
    hard = subprocess.run(["bash", "-c", "ulimit -H -l"], capture_output=True, text=True).stdout
    code, errors = run(script, stub)
    assert code == 0, errors
    assert ((tmp_path / "n").read_text(), (tmp_path / "l").read_text()) == ("500\n", hard)


def with_node(**node: object) -> Cluster:
    return Cluster.model_validate({**SLURM.model_dump(), "node": node})


def test_ranks_are_bound_by_torchrun_or_to_the_lists_of_the_profile(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    stub.show_gpus(2)
    near = render(tmp_path, stub, with_node(numa_binding="node"), resources={"gpus_per_node": 2})
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    code, errors = run(near, stub, PYTHONPATH=str(tmp_path))
    assert code == 0 and "this torch has no --numa-binding" in errors
    assert b"--numa-binding" not in stub.python_argv()
    (torch / "numa").mkdir()
    (torch / "numa" / "binding.py").touch()
    (stub.bin / "numactl").symlink_to(stub.bin / "sbatch")
    assert run(near, stub, PYTHONPATH=str(tmp_path))[0] == 0
    argv = stub.python_argv()
    assert argv[argv.index(b"--numa-binding") + 1] == b"node"
    assert run(render(tmp_path, stub, with_node(cpu_bind=["0-3,8", "4-7"])), stub)[0] == 0
    assert stub.python_env()[b"LAUNCHER_CPU_BIND"] == b"0-3,8 4-7"
    with pytest.raises(RenderError, match="has CPUs for 1 ranks of a node, the job starts 2"):
        render(tmp_path, stub, with_node(cpu_bind=["0-3"]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ["python", "-c", "x" * 2**17]}, "command: argument 2 has 128 KiB"),
        ({"command": ["python", "$" * 2**17]}, "command: argument 1 has 128 KiB"),
        ({"env": {"LONG": "x" * (2**17 - 17)}}, "env.LONG has 128 KiB"),
    ],
)
def test_what_no_process_can_be_given_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    with pytest.raises(RenderError, match=message):
        render(tmp_path, stub, **fields)


@pytest.mark.slow
def test_the_longest_that_a_process_can_be_given_arrives(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    env = "x" * (2**17 - 1 - len("LAUNCHER_ENV_LONG="))
    longest = "$" * (2**17 - 1)
    code, errors = run(render(tmp_path, stub, command=["echo", longest], env={"LONG": env}), stub)
    assert code == 0, errors
    assert stub.python_argv()[-1] == longest.encode()
    assert stub.python_env()[b"LAUNCHER_ENV_LONG"] == env.encode()
    stub.show_gpus(2)
    bound, longest = with_node(numa_binding="node"), "$" * (2**16 - 1)  # which torchrun gets doubled
    script = render(tmp_path, stub, bound, command=["echo", longest], resources={"gpus_per_node": 2})
    code, errors = run(script, stub)
    assert code == 0, errors
    assert stub.python_argv()[-1] == 2 * longest.encode()


@pytest.mark.parametrize("given", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_setting_of_the_user_stays(tmp_path: Path, given: str) -> None:
    stub = stubs.make(tmp_path / "stubs")
    stub.show_gpus(2)
    script = render(tmp_path, stub, resources={"gpus_per_node": 2}, recipe=RECIPE)
    assert run(script, stub, **{given: "backend:native"})[0] == 0
    assert stub.python_env().get(b"PYTORCH_CUDA_ALLOC_CONF", b"backend:native") == b"backend:native"
    assert run(script, stub)[0] == 0
    assert stub.python_env()[b"PYTORCH_CUDA_ALLOC_CONF"] == b"expandable_segments:True"
    plain = RECIPE.model_copy(update={"expandable_segments": False})
    assert "ALLOC" not in render(tmp_path, stub, resources={"gpus_per_node": 2}, recipe=plain).read_text()


def test_secrets_come_from_where_the_job_says_and_stand_in_no_file(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (stub.bin / "my key").write_text("from home\n")
    (tmp_path / "$key").write_text("from file\n")
    secrets = [
        *[{"name": "A", "env": "SOURCE_A"}, {"name": "B", "file": "~/my key"}, {"name": "D"}],
        {"name": "C", "file": str(tmp_path / "$key")},
    ]
    script = render(tmp_path, stub, secrets=secrets)
    code, errors = run(script, stub, SOURCE_A="from env", D="d value")
    assert code == 0, errors
    env = stub.python_env()
    assert [env[b"LAUNCHER_ENV_" + n] for n in (b"A", b"B", b"C", b"D")] == [
        b"from env",
        b"from home",
        b"from file",
        b"d value",
    ]
    assert not any(value in script.read_text() for value in ("from env", "from home", "from file", "d value"))
    code, errors = run(script, stub, SOURCE_A="from env")
    assert (code, "secret D has no value on this node" in errors) == (78, True)


def test_a_job_for_gpus_does_not_start_on_a_node_that_has_none(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi") or shutil.which("rocm-smi") or list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    stub = stubs.make(tmp_path / "stubs")
    code, errors = run(render(tmp_path, stub, resources={"gpus_per_node": 2}), stub)
    assert (code, errors.count("no GPU on this node")) == (78, 1)
    assert "GPUs per node of the job: 2" in errors
    assert not stub.out.exists()
    (stub.bin / "rocm-smi").symlink_to("/bin/true")
    assert run(render(tmp_path, stub, resources={"gpus_per_node": 2}), stub)[0] == 0


def test_missing_gpus_are_found_before_the_first_collective(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    stub.show_gpus(1)
    code, errors = run(render(tmp_path, stub, resources={"gpus_per_node": 2}), stub)
    assert (code, "this node shows 1 GPUs, the job needs 2" in errors) == (78, True)
    assert run(render(tmp_path, stub, resources={"gpus_per_node": 1}), stub)[0] == 0


@pytest.mark.parametrize(("between", "patience", "ends"), [("", "60", 78), ("1", "20", EXIT_SICK)])
def test_a_driver_that_hangs_does_not_hang_the_start(
    tmp_path: Path, between: str, patience: str, ends: int
) -> None:
    """nvidia-smi gives no answer and cannot be ended: another process holds its output open."""
    stub = stubs.make(tmp_path / "stubs")
    smi = stub.bin / "nvidia-smi"
    smi.write_text(f"#!/bin/bash\ntrap '' TERM HUP\necho $$ >>{tmp_path}/pids\nsleep 1000 &\nwait\n")
    smi.chmod(0o755)
    script = render(tmp_path, stub, resources={"gpus_per_node": 2})
    before = script.read_text()
    assert before.count(f"_patience={patience}") == 1
    script.write_text(before.replace(f"_patience={patience}", "_patience=0.2"))
    code, errors = run(script, stub, **({"LAUNCHER_ONLY_CHECK": between} if between else {}))
    assert (code, errors.count("nvidia-smi gives no answer within 0.2 s")) == (ends, 1)
    assert "driver of its GPUs hangs" in errors and not stub.out.exists()
    for pid in (tmp_path / "pids").read_text().split():
        subprocess.run(["pkill", "-KILL", "-P", pid])
        subprocess.run(["kill", "-KILL", pid])


def test_a_working_directory_that_is_missing_on_the_node_is_named(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = render(tmp_path, stub)
    script.write_text(script.read_text().replace(f"cd '{tmp_path}'", "cd '/no such folder'"))
    code, errors = run(script, stub)
    assert (code, "working directory of the job does not exist on this node" in errors) == (78, True)


def test_a_task_runs_the_entrypoint_of_launcher(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = render(tmp_path, stub, command=None, task="pkg.mod:Task", steps=3)
    assert run(script, stub)[0] == 0
    assert stub.python_argv()[-3:] == [str(stub.python).encode(), b"-m", b"launcher.train"]


def test_what_the_local_scheduler_cannot_do_is_refused(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    docker = Cluster.model_validate({"name": "l", "scheduler": "local", "container": {"runtime": "docker"}})
    with pytest.raises(RenderError, match="starts no container"):
        render(tmp_path, stub, docker)
