"""Small executables in the place of python, srun, scontrol ... that write down what reached them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

# Records argv and environment as NUL-separated bytes. In mode `wait` it is a supervisor that a signal or its
# stop file ends, in mode `wait-for-signal` one that a signal ends.
_PYTHON = f"""#!{sys.executable} -ES
import os, signal, sys, time
if sys.argv[1:2] == ["-c"] and "torch.distributed.run" not in sys.argv[2]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
mode = os.environ.get("STUB_MODE", "")
caught = []
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, frame: caught.append(signal.Signals(number).name))
out = os.environ["STUB_OUT"]
with open(out + ".new", "wb") as file:
    env = [name + b"=" + value for name, value in os.environb.items()]
    for item in [*map(os.fsencode, sys.argv), b"", b"", *env]:
        file.write(item + b"\\0")
os.rename(out + ".new", out)
if mode.startswith("wait"):
    deadline = time.monotonic() + 240
    stop_file = sys.argv[sys.argv.index("--stop-file") + 1] if "--stop-file" in sys.argv else "/nowhere"
    while not caught and time.monotonic() < deadline:
        if mode != "wait-for-signal" and os.path.exists(stop_file):
            break
        time.sleep(0.02)
    if os.path.exists(stop_file):
        caught.append("told: " + open(stop_file).read().strip())
    time.sleep(0.5)
    with open(out + ".signals", "w") as file:
        file.write(" ".join(caught))
    if mode == "wait-interrupted":
        with open(os.path.join(sys.argv[3], "state.json"), "w") as file:
            file.write('{{\\n  "state": "interrupted",\\n  "failure": "time-limit",\\n')
            file.write('  "reason": "its time was over",\\n  "requeue": true\\n}}')
sys.exit(int(os.environ.get("STUB_EXIT", "0")))
"""
_RECORD = '{ printf \'%s\\0\' "${0##*/}" "$@"; } >>"$STUB_OUT.${0##*/}"\n'
_SRUN = (
    "#!/bin/bash\nif [[ $* == *check-node.sh* ]]; then\n"
    "while [[ $1 == --* ]]; do shift; done\n"
    'for SLURMD_NODENAME in ${SLURM_JOB_NODELIST//,/ }; do export SLURMD_NODENAME; "$@"; done\nexit\nfi\n'
    + _RECORD
    + 'env -0 >"$STUB_OUT.srun.env"\n'
    'while [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n'
)
_SCONTROL = (
    "#!/bin/bash\n" + _RECORD + 'case "$1 $2" in\n'
    "'show hostnames') if [[ $3 ]]; then tr , '\\n' <<<\"$3\"; fi;;\n"
    "'show hostlist') echo \"$3\";;\n"
    "'show job') echo 'JobId=1 JobName=x PreemptTime=2026 Restarts=9'; echo \"   ${STUB_JOB:-}\";;\n"
    'requeue*) exit "${STUB_REQUEUE_EXIT:-0}";;\nesac\n'
)
_SBATCH = (
    "#!/bin/bash\n" + _RECORD + 'env -0 >"$STUB_OUT.sbatch.env"\necho 70008\nexit "${STUB_SBATCH_EXIT:-0}"\n'
)
_GETENT = (
    "#!/bin/bash\nwhile read -r ip name; do\n"
    '[[ $name == "$2" ]] && echo "$ip STREAM $name"\ndone <<<"$STUB_HOSTS"\n'
)
_IP = '#!/bin/bash\n[[ $STUB_ROUTE ]] && echo "$5 dev eth0 src $STUB_ROUTE uid 0"\n'
# Runs the command as `apptainer exec` does, as far as the environment goes: what the image sets (here
# STUB_IMAGE_ENV) wins over the host's, and APPTAINERENV_X over both (Apptainer's user guide, "Environment").
_APPTAINER = (
    "#!/bin/bash\n" + _RECORD + "shift\n"
    "while [[ $1 == --* ]]; do [[ $1 == --bind ]] && shift; shift; done; shift\n"
    'for item in ${STUB_IMAGE_ENV:-}; do export "$item"; done\n'
    'for name in "${!APPTAINERENV_@}"; do export "${name#APPTAINERENV_}=${!name}"; unset "$name"; done\n'
    'exec "$@"\n'
)


@dataclass(frozen=True)
class Stubs:
    """`bin` goes to the front of PATH; `python` is the interpreter to render with."""

    bin: Path
    out: Path

    @property
    def python(self) -> Path:
        return self.bin / "python3"

    def env(self, /, **more: str) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.bin), "LC_ALL": "C.UTF-8", "STUB_OUT": str(self.out), **more}

    def show_gpus(self, count: int) -> None:
        """Add an nvidia-smi that lists `count` GPUs."""
        lines = "".join(f"echo 'GPU {number}: NVIDIA A100 (UUID: x)'\n" for number in range(count))
        (self.bin / "nvidia-smi").write_text(f"#!/bin/bash\n{lines}")
        (self.bin / "nvidia-smi").chmod(0o755)

    def called(self, name: str) -> list[bytes]:
        """What a stub other than python was called with, over all calls, names included."""
        path = Path(f"{self.out}.{name}")
        return path.read_bytes().split(b"\0")[:-1] if path.exists() else []

    def python_argv(self) -> list[bytes]:
        """Arguments of the interpreter, without its own name."""
        items = self.out.read_bytes().split(b"\0")[:-1]
        return items[1 : _end_of_argv(items)]

    def python_env(self) -> dict[bytes, bytes]:
        items = self.out.read_bytes().split(b"\0")[:-1]
        return dict(item.split(b"=", 1) for item in items[_end_of_argv(items) + 2 :])


def _end_of_argv(items: list[bytes]) -> int:
    # Two empty items in a row, the last such pair before `NAME=`: arguments may be empty themselves.
    env_start = len(items)
    while env_start and b"=" in items[env_start - 1] and items[env_start - 1] != b"":
        env_start -= 1
    return env_start - 2


def make(folder: Path) -> Stubs:
    stubs = Stubs(folder / "bin", folder / "record")
    stubs.bin.mkdir(parents=True)
    texts = {"python3": _PYTHON, "srun": _SRUN, "scontrol": _SCONTROL, "getent": _GETENT, "ip": _IP}
    texts["sbatch"] = _SBATCH
    for name, text in {**texts, "apptainer": _APPTAINER}.items():
        (stubs.bin / name).write_text(text)
        (stubs.bin / name).chmod(0o755)
    return stubs
