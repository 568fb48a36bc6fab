"""Find scripts, modules and files that a job names and that do not exist, without running the user's code.

This runs on this machine before anything is sent, and on a node as part of the doctor.
"""

from __future__ import annotations

import ast
import glob
import importlib.util
import itertools
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath

from launcher.schedulers.base import Request
from launcher.schedulers.registry import scheduler_class
from launcher.spec.errors import Problem, SpecError
from launcher.spec.job import Job
from launcher.spec.records import ClusterRecord
from launcher.spec.similar import did_you_mean


def check_workdir(request: Request) -> None:
    """Check that the job's script or task exists. Skip what may be installed where the job runs.

    Raises SpecError if a script, a module, a class or an argument of the task is missing.
    """
    where = str(request.job_file) if request.job_file.exists() else "the job"
    cluster, workdir = request.cluster, request.workdir
    same_python, same_files = _uses_this_python(request), _sees_these_files(request)
    messages = missing(request.job, workdir, cluster.setup, python=same_python, files=same_files)
    problems = [Problem(where, field, message) for field, message in messages]
    if error := _syntax_error(request.cluster.setup):
        problems.append(Problem(f"profile {request.cluster.name}", "setup", error))
    if problems:
        raise SpecError(problems)


def _syntax_error(setup: Sequence[str]) -> str:
    """Return bash's message about lines that it cannot parse, or "" if there are none or there is no bash."""
    if not setup or (bash := shutil.which("bash")) is None:
        return ""
    text = "".join(f"{line}\n" for line in setup)
    done = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, env={"LC_ALL": "C"})
    return "" if done.returncode == 0 else done.stderr.strip().partition("\n")[0].removeprefix("bash: ")


def _uses_this_python(request: Request) -> bool:
    """Return whether this Python runs the job, and will find the same modules as now."""
    cluster = request.cluster
    own_python = cluster.paths.python is None and cluster.container.runtime == "none"
    settings = (*request.job.env, *cluster.env, *cluster.setup)
    scheduler_uses_it = scheduler_class(cluster.scheduler).uses_this_python
    other_paths = any(setting == "PATH" or "PYTHONPATH" in setting for setting in settings)
    return scheduler_uses_it and own_python and not other_paths


def missing(
    job: Job, workdir: Path, setup: Sequence[str], *, python: bool, files: bool
) -> Iterator[tuple[str, str]]:
    """Yield (field, message) for each script, module or file that the job names and that does not exist.

    Names in lines of `setup` are skipped, because these lines may create them. `python`: this Python runs the
    job. `files`: a path means the same file here and for the job.
    """
    if not workdir.is_dir():
        return
    if job.command is not None:
        if message := _why_no_program(job.command[0]):
            yield "command", message
            return
        script = script_of(job.command)
        created_by_setup = script is not None and any(PurePath(script).name in line for line in setup)
        if script is not None and not created_by_setup:
            yield from _no_program(job.command[0], script, workdir)
        elif script is None and python and not setup and "PATH" not in job.env:
            yield from _not_on_path(job.command[0], workdir)
            yield from _no_module(job.command, workdir)
        return
    module, _, name = (job.task or "").partition(":")
    file = _file_of(module, workdir)
    if file is None:
        if python and not _may_be_elsewhere(module):
            yield "task", f"there is no module {module}: neither in {workdir} nor installed"
        return
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        if python:  # another Python may support newer syntax
            yield "task", f"{file}:{error.lineno}: {error.msg}"
        return
    except (OSError, ValueError, RecursionError, MemoryError):
        return
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in classes:
        if not _is_assigned(tree, name):
            yield from _arguments(classes[name], job, file)
            if files:
                yield from _data_files(classes[name], job, workdir, setup)
    elif not _may_have(tree, name):
        others = f"; it has {', '.join(classes)}" if classes else ""
        yield "task", f"{file} has no class {name}{others}"


def _sees_these_files(request: Request) -> bool:
    """Return whether a path means the same file here and where the job runs."""
    inside = request.cluster.container.runtime != "none"
    record = ClusterRecord.of_profile(request.cluster)
    return not inside and scheduler_class(request.cluster.scheduler).place(record) is None


def _data_files(
    task: ast.ClassDef, job: Job, workdir: Path, setup: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Check the files that the arguments name: those annotated as `Path`, and `data` of launcher's own tasks.

    `data` may be a pattern. Files that `setup:` mentions are skipped, because it may create them.
    """
    is_shipped = (job.task or "").startswith("launcher.tasks.")
    inits = [node for node in task.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    arguments = [argument for init in inits for argument in (*init.args.args, *init.args.kwonlyargs)]
    for argument in arguments:
        value = job.args.get(argument.arg)
        annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        is_path = re.search(r"\bPath\b", annotation) or (is_shipped and argument.arg == "data")
        if not isinstance(value, str) or not is_path:
            continue
        created_by_setup = any(PurePath(value).name in line for line in setup)
        pattern = str(workdir / Path(value).expanduser())
        if not created_by_setup and not glob.glob(pattern, recursive=True):  # noqa: PTH207 (an absolute pattern)
            yield f"args.{argument.arg}", f"there is no {value} (looked from {workdir})"


def _why_no_program(first: str) -> str:
    """Return why the first argument of a command cannot name a program, or ""."""
    if not first or re.match(r"[A-Za-z_]\w*=", first):
        return f"{first!r} is no program; put variables into `env:`"
    if " " in first and "/" not in first:
        return (
            f"the program {first!r} is a whole command in one argument: write its words as separate "
            'arguments, or start a shell with [bash, -c, "..."]'
        )
    return ""


_FLAGS = re.compile("-[bBdEiIOPqsSuvx]+")
"Options of Python that take no value."
_SHELLS = ("sh", "bash", "zsh", "dash")


def script_of(command: tuple[str, ...]) -> str | None:
    """Return the file that a command needs in the working directory: `python -u train.py`, `./train.sh`."""
    first = command[0]
    if (arguments := _arguments_of_python(command)) is not None:
        first = next(arguments, "-")
    elif PurePath(first).name in _SHELLS:
        first = command[1] if len(command) > 1 else "-"
    elif "/" not in first:
        return None
    return None if first.startswith(("/", "~", "-")) or "{" in first or "$" in first else first


def _arguments_of_python(command: tuple[str, ...]) -> Iterator[str] | None:
    """Yield Python's arguments after its flags: a script or `-m`, and what follows. None if it is another
    program."""
    if not re.fullmatch(r"python[\d.]*", PurePath(command[0]).name):
        return None
    return itertools.dropwhile(_FLAGS.fullmatch, command[1:])


def _no_module(command: tuple[str, ...], workdir: Path) -> Iterator[tuple[str, str]]:
    """Yield that the package of `python -m package.module` does not exist, if `python` is this Python."""
    option, module = itertools.islice(itertools.chain(_arguments_of_python(command) or (), ("", "")), 2)
    package = module.partition(".")[0]
    program = shutil.which(command[0])
    is_this = program is not None and Path(program).parent == Path(sys.executable).parent
    if option != "-m" or not is_this or not package.isidentifier():
        return
    if _installed(package) is None and not any(workdir.glob(f"{package}*")):
        yield "command", f"there is no module {package}: neither in {workdir} nor installed"


def _no_program(first: str, script: str, workdir: Path) -> Iterator[tuple[str, str]]:
    """Yield why a script cannot be started: it does not exist, or it is the program and not executable."""
    try:
        mode = (workdir / script).stat().st_mode
    except OSError:
        hint = did_you_mean(script, (path.name for path in workdir.glob("*.*")))
        yield "command", f"there is no {script} in {workdir}" + (hint and f"; {hint}")
        return
    if first == script and not (stat.S_ISREG(mode) and mode & 0o111):
        yield (
            "command",
            f"{script} in {workdir} is not executable: `chmod +x {script}`, or write `{_run_by(script)}`",
        )


def _not_on_path(first: str, workdir: Path) -> Iterator[tuple[str, str]]:
    """Yield how to write a program that is in the working directory but not in a folder of PATH."""
    if "/" not in first and (workdir / first).is_file() and shutil.which(first) is None:
        yield "command", f"{first} is in {workdir}, which is not on the PATH: write `{_run_by(first)}`"


def _run_by(script: str) -> str:
    return f"{'python' if script.endswith('.py') else 'bash'} {script}"


def _file_of(module: str, workdir: Path) -> Path | None:
    """Return a module's source file, in the working directory or installed. Imports no package."""
    parts = module.split(".")
    roots = [workdir]
    if (spec := _installed(parts[0])) is not None:
        roots += [Path(folder).parent for folder in spec.submodule_search_locations or ()]
        if spec.origin is not None and not spec.submodule_search_locations:
            roots.append(Path(spec.origin).parent)
    for root in roots:
        path = root.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _installed(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _may_be_elsewhere(module: str) -> bool:
    """Return whether the module may be compiled, or its package may search further folders for modules."""
    spec = _installed(module.partition(".")[0])
    if spec is None:
        return False
    if not spec.submodule_search_locations or spec.origin is None:
        return True
    try:
        return "__path__" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def _is_assigned(tree: ast.Module, name: str) -> bool:
    """Return whether the name is also assigned, so that it may not be the class."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return any(node.id == name and isinstance(node.ctx, ast.Store) for node in names)


_DYNAMIC_NAMES = {"*", "globals", "locals", "vars", "exec", "setattr", "__getattr__"}


def _may_have(tree: ast.Module, name: str) -> bool:
    """Return whether the module may define the name by an import, an assignment, or only at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = {node.name}
        else:
            names = {node.id} if isinstance(node, ast.Name) else set()
        if names & {name, *_DYNAMIC_NAMES}:
            return True
    return False


def _arguments(task: ast.ClassDef, job: Job, file: Path) -> Iterator[tuple[str, str]]:
    """Compare `args:` with the class's own `__init__`. An inherited `__init__` is not checked."""
    methods = [node for node in task.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if len(methods) != 1 or task.decorator_list or task.keywords:
        return
    [init] = methods
    if init.args.kwarg is not None or init.args.posonlyargs or init.decorator_list:
        return
    positional = [arg.arg for arg in init.args.args][1:]
    by_name = [arg.arg for arg in init.args.kwonlyargs]
    accepted = [*positional, *by_name]
    for name in job.args:
        if name not in accepted:
            hint = did_you_mean(name, accepted) or f"its arguments: {', '.join(accepted) or 'none'}"
            yield f"args.{name}", f"{task.name} in {file} has no such argument; {hint}"
    required = positional[: len(positional) - len(init.args.defaults)] if positional else []
    required += [
        name for name, default in zip(by_name, init.args.kw_defaults, strict=True) if default is None
    ]
    for name in required:
        if name not in job.args:
            yield f"args.{name}", f"is missing: {task.name} in {file} needs it"
