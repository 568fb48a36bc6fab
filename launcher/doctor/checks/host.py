"""Checks of a node's host: memory, limits, clock and installed versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from launcher.doctor.checks.row import ONE_KIND, Check
from launcher.doctor.values import Expected, Measured, Opinion
from launcher.spec.quantities import GIB, format_bytes

MEMORY_SHARE = 0.95
"Fraction of the nominal memory that must be usable. The kernel reserves some of it."
FREE_SHARE = 0.5
LOAD = 1.5
"Processes per CPU of the host that computed or waited for a disk in the last minute (proc(5), loadavg)."
SHM_BYTES = GIB
"DataLoader workers pass batches and NCCL its buffers through /dev/shm; 64 MiB is Docker's default."
SHM_LEAST = 32 * 2**20
"NCCL allocates about 10 MiB of /dev/shm for each pair of ranks that it connects through it."
FILES, FILES_LEAST = 4096, 1024
"Open files. Each pair of ranks has sockets, each DataLoader worker pipes and shared tensors."
STACK = 8 * 2**20
"Linux's default. numpy and MKL threads overflow a much smaller stack."
MEMLOCK = 8 * 2**20
"Linux's default since 5.16. Without InfiniBand little memory is locked."
UNLIMITED = -1
CLOCK_POOR, CLOCK_BROKEN = 1.0, 60.0
"Seconds. Certificates, Slurm's credentials and the order of log lines depend on the clocks."
BITSANDBYTES = (0, 50)
PYTHON = (3, 10)
SOFTWARE = frozenset({"torch", "bitsandbytes"})
"Checks of software that a job with `command:` may not need."


def load(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"below {LOAD:g} for each CPU"
    if measured.value["load"] < LOAD * measured.value["cpus"]:
        return Opinion("good", wanted)
    cause = "Other processes keep the CPUs busy: what is measured below is slow for that reason."
    return Opinion("poor", wanted, cause, "End them (`top`), or ask the scheduler for the node alone.")


def memory(measured: Measured, expected: Expected) -> Opinion:
    if expected.memory is None:
        return Opinion("good")
    wanted = f"at least {format_bytes(expected.memory)}"
    if measured.value >= MEMORY_SHARE * expected.memory:
        return Opinion("good", wanted)
    return Opinion(
        "broken",
        wanted,
        "This process may use less host memory than the profile promises, because of its cgroup or the "
        "machine. A plan that counts on the rest ends as host-oom.",
        "Ask for more memory (resources.memory_per_node), or correct node.memory in the profile.",
    )


def free_memory(measured: Measured, expected: Expected) -> Opinion:
    share = measured.value["free"] / measured.value["limit"]
    if share >= FREE_SHARE:
        return Opinion("good", "at least half of it")
    return Opinion(
        "poor",
        "at least half of it",
        "Other processes hold most of the host memory.",
        "End them, or ask the scheduler for the node alone.",
    )


def shm(measured: Measured, expected: Expected) -> Opinion:
    promised = expected.shm or SHM_BYTES
    wanted = f"at least {format_bytes(promised)}"
    cure = (
        "In a container: container.shm of the profile, or --shm-size and --ipc=host for docker. On a host: "
        "mount -o remount,size=50% /dev/shm. Until then NCCL_SHM_DISABLE=1 and train.workers: 0 avoid it."
    )
    if measured.value < min(SHM_LEAST, promised):
        return Opinion(
            "broken", wanted, "/dev/shm is too small for NCCL and for DataLoader workers: bus errors.", cure
        )
    if measured.value < promised:
        return Opinion("poor", wanted, "DataLoader workers may end with a bus error (SIGBUS).", cure)
    return Opinion("good", wanted)


def memlock(measured: Measured, expected: Expected) -> Opinion:
    limit, infiniband = measured.value["bytes"], measured.value["infiniband"]
    if limit == UNLIMITED:
        return Opinion("good", "unlimited")
    cure = "Set LimitMEMLOCK=infinity for slurmd or sshd, `* - memlock unlimited` in limits.conf, or "
    cure += "--ulimit memlock=-1 for docker."
    if infiniband:
        cause = "InfiniBand and RoCE lock the memory that they send from; NCCL fails to register buffers."
        return Opinion("broken", "unlimited", cause, cure)
    if limit < MEMLOCK:
        cause = "Little memory can be locked: pinned buffers of io_uring, O_DIRECT and RDMA libraries fail."
        return Opinion("poor", f"at least {format_bytes(MEMLOCK)}", cause, cure)
    return Opinion("good", f"at least {format_bytes(MEMLOCK)}")


def nofile(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {FILES}"
    if measured.value == UNLIMITED or measured.value >= FILES:
        return Opinion("good", wanted)
    return Opinion(
        "broken" if measured.value < FILES_LEAST else "poor",
        wanted,
        'Sockets and DataLoader workers run out of file descriptors: "Too many open files".',
        "Raise the hard limit: LimitNOFILE of slurmd or sshd, nofile in limits.conf.",
    )


def stack(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {format_bytes(STACK)}"
    if measured.value == UNLIMITED or measured.value >= STACK:
        return Opinion("good", wanted)
    cause = "Threads of numerical libraries may overflow their stack: a segmentation fault."
    return Opinion("poor", wanted, cause, "Raise the limit: ulimit -s 8192 in `setup:` of the profile.")


def clock(measured: Measured, expected: Expected) -> Opinion:
    offset = abs(measured.value)
    wanted = f"within {CLOCK_POOR:g} s"
    if offset <= CLOCK_POOR:
        return Opinion("good", wanted)
    return Opinion(
        "broken" if offset > CLOCK_BROKEN else "poor",
        wanted,
        "The clock of this node is wrong. Log lines appear in the wrong order; certificates and Slurm's "
        "credentials are refused if the difference grows.",
        "Start chronyd or systemd-timesyncd on the node: `chronyc tracking` shows the offset.",
    )


def encoding(measured: Measured, expected: Expected) -> Opinion:
    if str(measured.value).lower().replace("-", "") == "utf8":
        return Opinion("good", "utf-8")
    cause = "Python reads text files with this encoding: other characters raise UnicodeDecodeError."
    return Opinion("poor", "utf-8", cause, "Set LC_ALL: C.UTF-8 in `env:` of the profile.")


def python(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at least {PYTHON[0]}.{PYTHON[1]}"
    if version(measured.value) >= PYTHON:
        return Opinion("good", wanted)
    return Opinion("broken", wanted, "launcher does not run with it.", "Set paths.python of the profile.")


def torch(measured: Measured, expected: Expected) -> Opinion:
    versions = measured.value
    if expected.gpus_per_node and not versions["cuda"]:
        return Opinion(
            "broken",
            "a build for CUDA",
            "This torch is a CPU build: training on a GPU fails.",
            "Install torch from the index of the driver's CUDA version (https://pytorch.org).",
        )
    if version(versions["torch"]) < (2, 11):
        return Opinion("broken", "at least 2.11", "launcher needs a newer torch.", "Upgrade torch.")
    if versions["misfits"]:
        cause = f"Libraries are not those that torch was built with: {', '.join(versions['misfits'])}."
        return Opinion("poor", "its own libraries", cause, "Install torch again, with its dependencies.")
    return Opinion("good", "at least 2.11")


def bitsandbytes(measured: Measured, expected: Expected) -> Opinion:
    """Judge whether bitsandbytes has a library for torch's CUDA major version (its cextension.py)."""
    versions = measured.value
    cure = "Upgrade bitsandbytes, or choose other optimizers."
    if version(versions["version"]) < BITSANDBYTES:
        cause = "8-bit optimizers and NF4 weights need a newer bitsandbytes."
        return Opinion("poor", "at least 0.50", cause, cure)
    majors = {version(built)[0] for built in versions["cuda"]}
    if versions["torch"] and version(versions["torch"])[0] not in majors:
        built_for = ", ".join(versions["cuda"]) or "none"
        cause = f"It was built for CUDA {built_for}, and torch for {versions['torch']}."
        return Opinion("poor", f"CUDA {version(versions['torch'])[0]}", cause, cure)
    return Opinion("good", "at least 0.50")


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _limit(value: Any, show: Callable[[Any], str] = format_bytes) -> str:
    return "unlimited" if value == UNLIMITED else show(value)


def _torch(value: Any) -> str:
    parts = [value["torch"], f"CUDA {value['cuda']}" if value["cuda"] else "no CUDA"]
    return ", ".join([*parts, *([f"NCCL {value['nccl']}"] if value["nccl"] else [])])


_ABSENT = Opinion("broken", "installed", "It is not installed for this Python.", "Set paths.python.")

ROWS = (
    Check("host", "host name", "node"),
    Check("cpus", "CPUs", "node", alike="poor", alike_cure=ONE_KIND),
    Check("load", "load", "node", load, lambda value: f"{value['load']:.1f} on {value['cpus']} CPUs"),
    Check(
        "memory", "host memory", "node", memory, format_bytes, alike="poor", alike_cure=ONE_KIND, fixed=True
    ),
    Check(
        "free-memory", "free host memory", "node", free_memory,
        lambda value: f"{format_bytes(value['free'])} of {format_bytes(value['limit'])}",
    ),
    Check("shm", "/dev/shm", "node", shm, format_bytes, fixed=True),
    Check("memlock", "locked memory", "node", memlock, lambda value: _limit(value["bytes"]), fixed=True),
    Check("nofile", "open files", "node", nofile, lambda value: _limit(value, str), fixed=True),
    Check("stack", "stack", "node", stack, _limit),
    Check("clock", "clock", "node", clock, lambda value: f"{value:+.2f} s"),
    Check("encoding", "text encoding", "node", encoding),
    Check("python", "Python", "node", python, alike="broken", fixed=True),
    Check("launcher", "launcher", "node", alike="broken", unmeasured=_ABSENT, fixed=True),
    Check("torch", "torch", "node", torch, _torch, alike="broken", unmeasured=_ABSENT, fixed=True),
    Check(
        "bitsandbytes", "bitsandbytes", "node", bitsandbytes, lambda value: str(value["version"]),
        alike="poor",
        unmeasured=Opinion("poor", "installed", "8-bit optimizers and NF4 weights are not available."),
    ),
)  # fmt: skip
