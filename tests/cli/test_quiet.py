"""What a library says when the interpreter is taken apart is no part of a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = """
# As nanobind in triton 3.9: a line on stderr when the process ends. The rest of triton is missing.
import ctypes, pathlib

libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
line = ctypes.c_void_p(libc.strdup(b"nanobind: leaked 4 instances!"))
libc.__cxa_atexit(ctypes.cast(libc.perror, ctypes.c_void_p), line, None)
pathlib.Path(__file__).with_name("imported").touch()
raise ImportError("a stand-in")
"""


@pytest.mark.slow
def test_a_cold_plan_prints_only_its_progress_to_stderr(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(TRITON)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)

    imported = tmp_path / "triton" / "imported"
    assert "nanobind: leaked" in ran("-c", "import triton").stderr, "the stand-in does what triton does"
    imported.unlink()
    job = str(ROOT / "examples" / "llama-tiny.yaml")
    done = ran("-m", "launcher", "plan", job, "-c", "runpod-a6000")
    assert imported.exists(), "torch imports it"
    assert done.returncode == 0 and "the tensors of a rank need" in " ".join(done.stdout.split())
    assert [line for line in done.stderr.splitlines() if not line.startswith("launcher: ")] == []
    assert (tmp_path / "cache" / "launcher" / "traces").is_dir()
    refused = ran("-m", "launcher", "plan", job, "-c", "runpod-a6000", "--set", "recipe.sharding=none")
    assert refused.returncode == 4 and refused.stderr.startswith("launcher: ")
    assert "nanobind" not in refused.stderr


def test_leaving_early_keeps_exit_codes_and_functions_of_atexit(tmp_path: Path) -> None:
    program = f"""
import atexit, sys
from launcher.cli import main

def ends(*_):
    atexit.register(open, {str(tmp_path / "atexit")!r}, "w")
    print("told")
    raise SystemExit(eval(sys.argv[1]))

sys.modules["torch"] = sys
main._main = ends
main.main()
"""
    for code, expected in (("None", 0), ("7", 7), ("'words'", 1), ("True", 1)):
        done = subprocess.run([sys.executable, "-c", program, code], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (expected, "told\n"), done.stderr
        assert done.stderr == ("words\n" if code == "'words'" else "")
        (tmp_path / "atexit").unlink()
