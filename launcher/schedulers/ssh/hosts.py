"""Send requests to hosts, together with the program that answers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.login import NOT_FOUND, Login, why_failed
from launcher.schedulers.over_ssh.ssh import login_environment

_PACKAGE = Path(__file__).parents[2]
_MODULES = (
    "rundir.time",
    "rundir.versions",
    "supervise.ports",
    "supervise.secrets",
    "supervise.gpus",
    "supervise.start",
    "schedulers.ssh.reachability",
    "schedulers.ssh.on_host",
)
# The modules come first on stdin, then the request: neither appears in a process list.
_BOOT = """
import json, sys, types
sys.path[:1] = []
for name, text in json.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
S = TypeVar("S")
T = TypeVar("T")


class HostError(SchedulerError):
    """A host has refused the request; nothing was done there."""


def ask_host(login: Login, python: str, request: Mapping[str, Any], timeout: float = 120.0) -> dict[str, Any]:
    """Run one of on_host.ACTIONS. Raises LoginError, and HostError if the host refuses or cannot answer."""
    program = [
        [f"launcher.{module}", (_PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")]
        for module in _MODULES
    ]
    text = json.dumps(program).encode()
    script = f"{login_environment()}exec {quote(python)} -c {quote(_BOOT)}"
    stdin = f"{len(text)}\n".encode() + text + json.dumps(request).encode()
    done = login.run(script, stdin=stdin, timeout=timeout)
    if done.returncode in (NOT_FOUND, NOT_FOUND - 1):
        raise HostError(
            f"{login.name}: there is no interpreter {python}; write the absolute path of the host's "
            "interpreter that has launcher and torch into paths.python of the profile"
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise HostError(f"{login.name}: {python} gave no answer: {why_failed(done)}") from None
    if not isinstance(answer, dict):
        raise HostError(f"{login.name}: {python} gave no answer")
    if "refused" in answer:
        raise HostError(f"{login.name}: {answer['refused']}")
    return answer


def in_parallel(work: Callable[[S], T], items: Iterable[S]) -> list[T | SchedulerError]:
    """Run `work` on all items in parallel. Return each result, or the error in its place."""

    def result_or_error(item: S) -> T | SchedulerError:
        try:
            return work(item)
        except SchedulerError as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(result_or_error, items))


def results_or_raise(results: Sequence[T | SchedulerError]) -> list[T]:
    """Return the results. Raises SchedulerError with the messages of every host that failed."""
    errors = [result for result in results if isinstance(result, SchedulerError)]
    if errors:
        raise type(errors[0])("\n".join(map(str, errors)))
    return [result for result in results if not isinstance(result, SchedulerError)]
