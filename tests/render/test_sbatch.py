"""The body of the batch script under stubs of srun and scontrol: exit codes, signals, hosts, ports."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.render.render import RenderError, Target, render_run
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from tests.render import stubs
from tests.render.test_arrives import slurm_reads

CLUSTER = Cluster.model_validate(
    {"name": "s", "scheduler": "slurm", "max_nodes": 4, "slurm": {"signal_seconds": 60}}
)
HOSTS = "127.0.1.1 n1\n10.0.0.1 n1\n10.0.0.2 n2"


def write(folder: Path, stub: stubs.Stubs, cluster: Cluster = CLUSTER, **fields: object) -> Path:
    """Render into `folder/run/scripts`; gives the batch script."""
    job = Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"], **fields})
    run_dir = folder / "run"
    (run_dir / "scripts").mkdir(parents=True, exist_ok=True)
    target = Target(
        job=job,
        cluster=cluster,
        run_id="run",
        run_dir=str(run_dir),
        workdir=str(folder),
        python=str(stub.python),
        nodes=job.resources.nodes,
        ranks_per_node=1,
    )
    for file in render_run(target):
        (run_dir / "scripts" / file.path).write_text(file.text)
    return run_dir / "scripts" / "job.sbatch"


def start(script: Path, stub: stubs.Stubs, **env: str) -> subprocess.Popen[bytes]:
    slurm = {"SLURM_JOB_ID": "70007", "SLURM_JOB_NODELIST": "n1", **env}
    return subprocess.Popen(["bash", str(script)], env=stub.env(**slurm), stderr=subprocess.PIPE, cwd="/")


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors.decode()


@pytest.mark.parametrize("code", [0, 1, 85, 143])
def test_the_exit_code_of_the_supervisor_survives_srun_and_the_batch_shell(tmp_path: Path, code: int) -> None:
    stub = stubs.make(tmp_path / "stubs")
    got, _ = finish(start(write(tmp_path, stub), stub, STUB_EXIT=str(code)))
    assert got == code


def test_the_code_of_the_first_node_counts_when_srun_ends_the_others(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    srun = (stub.bin / "srun").read_text().replace('exec "$@"', '"$@"\nexit 143')
    (stub.bin / "srun").write_text(srun)
    assert finish(start(script, stub, STUB_EXIT="17"))[0] == 17
    (tmp_path / "run" / "slurm-70007-0.exit").unlink()
    (tmp_path / "run" / "scripts" / "on-node.sh").unlink()
    assert finish(start(script, stub, STUB_EXIT="17"))[0] == 143


def test_srun_gets_every_rule_of_the_catalogue(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2, "cpus_per_node": 8})
    env = {"SLURM_JOB_NODELIST": "n1,n2", "STUB_HOSTS": HOSTS, "SLURM_CPUS_PER_TASK": "8"}
    code, errors = finish(start(script, stub, SLURM_RESTART_COUNT="2", STUB_ROUTE="10.0.0.1", **env))
    assert code == 0, errors
    called = [item.decode() for item in stub.called("srun")]
    run = tmp_path / "run"
    assert called[1:9] == [
        *["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--export=ALL"],
        *["--unbuffered", "--open-mode=append", f"--output={run}/slurm-%j-2-node-%n.out"],
    ]
    assert not any("gpu" in item or "gres" in item for item in called)
    srun_env = Path(f"{stub.out}.srun.env").read_bytes().split(b"\0")
    assert b"SRUN_CPUS_PER_TASK=8" in srun_env
    port = 61000 + (70007 * 31 + 2 * 17) % 4536
    assert stub.python_argv() == [
        *[b"-m", b"launcher.supervise", str(run).encode(), b"--nodes", b"2", b"--node-rank", b"0"],
        *[b"--rendezvous", b"10.0.0.1", b"--port-base", str(port).encode()],
    ]
    assert 61000 <= port <= 65535


@pytest.mark.parametrize(
    ("hosts", "nodelist", "message"),
    [
        (HOSTS, "", "Slurm names 0 hosts"),
        (HOSTS, "n1", "Slurm names 1 hosts"),
        ("127.0.1.1 n1\n::1 n1\n127.0.0.1 n2", "n1,n2", "no address that another node can reach"),
    ],
)
def test_no_host_or_only_loopback_fails_at_once(
    tmp_path: Path, hosts: str, nodelist: str, message: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2})
    started = time.monotonic()
    code, errors = finish(start(script, stub, SLURM_JOB_NODELIST=nodelist, STUB_HOSTS=hosts))
    assert code == 78
    assert message in errors
    assert not stub.called("srun")
    assert time.monotonic() - started < 10


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 15
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_usr2_reaches_the_supervisor_alone_and_the_step_is_waited_for(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="85")
    wait_for(stub.out)
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    code, errors = finish(process)
    assert code == 85, errors
    assert Path(f"{stub.out}.signals").read_text() == "SIGUSR2"
    assert errors.count("asking for a checkpoint") == 1
    assert not stub.called("scontrol")[5:], "without an interrupted run there is nothing to requeue"


@pytest.mark.parametrize(
    ("array", "expected"), [({}, "70007"), ({"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}, "9_3")]
)
@pytest.mark.parametrize("requeue", [True, False])
def test_a_run_that_the_time_limit_interrupted_goes_back_into_the_queue_when_the_job_allows_it(
    tmp_path: Path, array: dict[str, str], expected: str, requeue: bool
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    env = {"STUB_MODE": "wait-interrupted", "STUB_EXIT": "85", "STUB_REQUEUE_EXIT": "1"}
    script = write(tmp_path, stub, requeue=requeue)
    assert ("--requeue" if requeue else "--no-requeue") in slurm_reads(script.read_text())
    process = start(script, stub, **env, **array)
    wait_for(stub.out)
    process.send_signal(signal.SIGUSR2)
    code, errors = finish(process)
    assert code == 85, "a failing requeue does not replace the exit code"
    called = [item.decode() for item in stub.called("scontrol")]
    assert (called[-2:] == ["requeue", expected]) is requeue, errors


def test_term_ends_no_wait_and_is_passed_to_nobody_twice(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="3")
    wait_for(stub.out)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR2)  # ends the stub
    assert finish(process)[0] == 3
    assert Path(f"{stub.out}.signals").read_text() == "SIGUSR2"


def test_a_failing_setup_line_stops_the_job_with_its_reason(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, CLUSTER.model_copy(update={"setup": ("echo $UNSET_IS_FINE", "(exit 9)")}))
    code, errors = finish(start(script, stub))
    assert code == 78
    assert "setup line of the cluster profile failed with exit code 9" in errors
    assert not stub.called("srun")


def test_setup_runs_once_and_reaches_the_supervisor(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, CLUSTER.model_copy(update={"setup": ("export FROM_SETUP='a b'",)}))
    assert finish(start(script, stub))[0] == 0
    assert stub.python_env()[b"FROM_SETUP"] == b"a b"
    assert stub.python_env()[b"LAUNCHER_SETUP_DONE"] == b"1"


def with_slurm(**slurm: object) -> Cluster:
    return Cluster.model_validate({**CLUSTER.model_dump(), "slurm": {"signal_seconds": 60, **slurm}})


def test_gpus_time_memory_and_extra_options_are_written_as_slurm_reads_them(tmp_path: Path) -> None:
    cluster = with_slurm(
        gpu_request="gres", gres_type="a100", extra={"mail-type": "END,FAIL", "contiguous": True}
    )
    resources = {"gpus_per_node": 4, "time": "1d2h", "memory_per_node": "100.5MiB", "cpus_per_node": 16}
    script = write(tmp_path, stubs.make(tmp_path / "stubs"), cluster, resources=resources)
    options = slurm_reads(script.read_text())
    expected = {"--gres=gpu:a100:4", "--time=1-02:00:00", "--mem=101M", "--cpus-per-task=16", "--nodes=1"}
    expected |= {"--mail-type=END,FAIL", "--contiguous", "--signal=B:USR2@60", "--ntasks-per-node=1"}
    assert expected <= set(options)
    assert "--open-mode=append" in options and "set -x" not in script.read_text()


@pytest.mark.parametrize(
    ("slurm", "resources", "expected"),
    [
        ({"exclusive": True}, {}, ["--mem=0"]),
        ({"exclusive": True}, {"memory_per_node": "1GiB"}, ["--mem=1024M"]),
        ({"exclusive": True, "extra": {"mem-per-cpu": "4G"}}, {}, ["--mem-per-cpu=4G"]),
        ({"exclusive": True, "extra": {"mem": "100G"}}, {}, ["--mem=100G"]),
        ({"extra": {"mem": 0}}, {}, ["--mem=0"]),
        ({}, {}, []),
    ],
)
def test_an_exclusive_node_comes_with_all_of_its_memory(
    tmp_path: Path, slurm: dict[str, object], resources: dict[str, object], expected: list[str]
) -> None:
    script = write(tmp_path, stubs.make(tmp_path / "stubs"), with_slurm(**slurm), resources=resources)
    assert [option for option in slurm_reads(script.read_text()) if option.startswith("--mem")] == expected


@pytest.mark.parametrize(
    ("slurm", "resources", "message"),
    [
        ({"extra": {"ntasks": 4}}, {}, "launcher sets this option itself"),
        ({"extra": {"container-image": "x"}}, {}, "launcher sets this option itself"),
        ({"extra": {"a b": "x"}}, {}, "not the long name of an sbatch option"),
        ({"extra": {"mem-per-cpu": "1G"}}, {"memory_per_node": "1GiB"}, "exclude each other"),
        ({"extra": {"mem": 0}}, {"memory_per_node": "1GiB"}, "exclude each other"),
        ({}, {"time": "60s"}, "not longer than slurm.signal_seconds"),
        ({"account": "a\nb"}, {}, "control character"),
    ],
)
def test_options_that_would_break_the_job_are_refused(
    tmp_path: Path, slurm: dict[str, object], resources: dict[str, object], message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        write(tmp_path, stubs.make(tmp_path / "stubs"), with_slurm(**slurm), resources=resources)
