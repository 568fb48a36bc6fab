"""What the worker gives a rank that torchrun does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_OOM, EXIT_TRAINED
from launcher.supervise.judge import Evidence, judge, read_records

SAY = """
import os
print(os.environ.get("GLIBC_TUNABLES", "none")[:22])
"""
HUGE = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("facts", "env", "heap"),
    [
        ({"job": {"task": "m:T"}, "gpus_per_node": 0}, {}, HUGE),
        ({"job": {"task": "m:T"}, "gpus_per_node": 0}, {"GLIBC_TUNABLES": "the user's"}, "the user's"),
        ({"job": {"task": "m:T"}, "gpus_per_node": 1}, {}, "none"),
        ({"job": {"command": ["x"]}, "gpus_per_node": 0}, {}, "none"),
    ],
)
def test_a_task_on_the_cpu_has_its_heap_in_huge_pages(
    tmp_path: Path, facts: dict[str, object], env: dict[str, str], heap: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(facts))
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_RUN_ID": "r", "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    outside = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    subprocess.run(
        [sys.executable, "-m", "launcher.supervise.worker", "--", sys.executable, "-c", SAY],
        env={**outside, **place, **env},
    )
    said = (tmp_path / "attempts/000/logs/node-00/rank-000.out").read_text()
    assert said.partition(" ")[2].strip() == heap


@pytest.mark.parametrize(
    ("what", "code", "reported"), [({"task": "m:T"}, 0, 1), ({"task": "m:T"}, EXIT_TRAINED, 0), ({}, 0, 0)]
)
def test_a_task_that_ends_with_0_before_its_training_did_has_not_succeeded(
    tmp_path: Path, what: dict[str, str], code: int, reported: int
) -> None:
    """A timer in the task may call os._exit(0), and a C library exit(0)."""
    (tmp_path / "run.json").write_text(json.dumps({"job": what or {"command": ["x"]}}))
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    script = f"import os; os._exit({code})"
    done = subprocess.run(
        [sys.executable, "-m", "launcher.supervise.worker", "--", sys.executable, "-c", script],
        env={**os.environ, **place},
    )
    record = json.loads((tmp_path / "attempts/000/exits/rank-000.json").read_text())
    assert done.returncode == record["exit_code"] == reported
    error = tmp_path / "attempts/000/errors/rank-000.json"
    assert error.exists() == (reported != 0)
    assert not reported or json.loads(error.read_text())["failure"] == "user-error"


@pytest.mark.parametrize(
    ("script", "code", "other"),
    [
        ("import os; print('no vocabulary', flush=True); os._exit(1)", 1, True),
        ("import os; os._exit(3)", 3, True),
        ("raise ValueError('no vocabulary')", 1, False),
        (f"import os; os._exit({EXIT_OOM})", EXIT_OOM, False),
    ],
)
def test_an_exit_code_that_nothing_explains_is_that_of_the_task(
    tmp_path: Path, script: str, code: int, other: bool
) -> None:
    """Such runs were started again and again, as after an unknown failure."""
    (tmp_path / "run.json").write_text(json.dumps({"job": {"task": "m:T"}}))
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "launcher.supervise.worker", "--", sys.executable, "-c", script],
        env={**os.environ, **place},
    )
    assert done.returncode == code
    attempt = RunDir(tmp_path).attempt(0)
    verdict = judge(
        Evidence(1, {0: 1}, read_records(attempt, "errors"), read_records(attempt, "exits"), started={0: 0})
    )
    assert verdict.failure == ("unknown" if code == EXIT_OOM else "user-error")
    assert (f"ended with exit code {code} before its training did" in (verdict.exception or "")) == other


SAY_HASH = "print(hash('a word'))"


def test_sets_of_strings_have_one_order_on_all_ranks_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    """A vocabulary made from a set then gives a word the same number everywhere, and after a restart."""
    (tmp_path / "run.json").write_text("{}")
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0"}
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    for rank, of_job in enumerate([{}, {}, {"LAUNCHER_ENV_PYTHONHASHSEED": "1"}]):
        subprocess.run(
            [sys.executable, "-m", "launcher.supervise.worker", "--", sys.executable, "-c", SAY_HASH],
            env={**outside, **place, "RANK": str(rank), **of_job},
            check=True,
        )
    logs = [tmp_path / f"attempts/000/logs/node-00/rank-{rank:03}.out" for rank in range(3)]
    first, second, third = (log.read_text().partition(" ")[2] for log in logs)
    assert first == second != third


TOLD_EARLY = """
import os, signal, sys
from launcher.supervise import worker
class Told(worker.Worker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
worker.Worker = Told
sys.argv[1:] = [sys.executable, "-c", "import time; time.sleep(600)"]
worker.main()
"""


def test_a_rank_that_is_ended_before_it_has_begun_leaves_its_record(tmp_path: Path) -> None:
    """Where another rank fails at once; a rank with a log and no record was killed."""
    (tmp_path / "run.json").write_text("{}")
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", TOLD_EARLY], env={**os.environ, **place}, timeout=240)
    assert done.returncode == -signal.SIGTERM
    record = json.loads((tmp_path / "attempts/000/exits/rank-000.json").read_text())
    assert record["exit_code"] == -signal.SIGTERM and record["stopping"]


TOLD_BY_ITS_RANK = """
import signal, subprocess, sys, time
from launcher.supervise import worker
class Rank(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        while signal.SIGTERM not in signal.sigpending():
            time.sleep(0.001)
subprocess.Popen = Rank
rank = "import os, signal, sys; os.kill(os.getppid(), signal.SIGTERM); sys.exit(7)"
sys.argv[1:] = [sys.executable, "-c", rank]
worker.main()
"""


def test_a_rank_that_signals_its_worker_at_once_was_not_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    env = {**os.environ, **place, "LAUNCHER_SUPERVISED": str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", TOLD_BY_ITS_RANK], env=env, timeout=240)
    assert done.returncode == 7
    assert not json.loads((tmp_path / "attempts/000/exits/rank-000.json").read_text())["stopping"]


RAISES = """
from torch.distributed.elastic.multiprocessing.errors import record
import os
@record
def main():
    raise RuntimeError("refused: " + os.environ["API_TOKEN"])
main()
"""


def test_torchrun_is_told_of_a_recorded_exception_with_secrets_masked(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    told = tmp_path / "error.json"
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_ATTEMPT": "0", "RANK": "0"}
    secret = {"LAUNCHER_SECRETS": "API_TOKEN", "LAUNCHER_ENV_API_TOKEN": "s3cr3t-v4lue-91f2"}
    done = subprocess.run(
        [sys.executable, "-m", "launcher.supervise.worker", "--", sys.executable, "-c", RAISES],
        env={**os.environ, **place, **secret, "TORCHELASTIC_ERROR_FILE": str(told)},
        timeout=240,
    )
    assert done.returncode == 1
    assert "refused: ***" in json.loads(told.read_text())["message"]["message"]
    assert "s3cr3t" not in told.read_text()
