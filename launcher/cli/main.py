"""`launcher VERB`. Each verb is a function in a module of this package."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import os
import signal
import sys
from typing import NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from launcher import __version__
from launcher.cli import (
    clusters,
    compare,
    doctor,
    export,
    images,
    job,
    logs,
    plan,
    render,
    report,
    resume,
    runpod,
    runs,
    snapshot,
    submit,
    sweep_verbs,
    top,
    why,
)
from launcher.cli.output import (
    EXIT_NOT_FOUND,
    EXIT_REFUSED,
    EXIT_UNCLEAR,
    EXIT_USAGE,
    fail,
    make_output_harmless,
    message_of,
)
from launcher.cli.spinner import LongWork
from launcher.spec.progress import listen

app = typer.Typer(
    name="launcher",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fits a PyTorch training job into GPU memory, submits it, watches it, and keeps it running when "
    "memory runs out.",
)


def _version(requested: bool) -> None:
    if requested:
        print(f"launcher {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
) -> None:
    pass


START, WATCH, FILES = "Start", "Watch", "Files"
app.command(cls=submit.WithCommand, rich_help_panel=START)(submit.submit)
app.command(cls=submit.WithCommand, rich_help_panel=START)(submit.run)
app.command(rich_help_panel=START)(plan.plan)
app.command(rich_help_panel=START)(render.render)
app.command("list", rich_help_panel=WATCH)(runs.list_runs)
app.command(rich_help_panel=WATCH)(top.top)
app.command(rich_help_panel=WATCH)(runs.status)
app.command(rich_help_panel=WATCH)(logs.logs)
app.command(rich_help_panel=WATCH)(why.why)
app.command(rich_help_panel=WATCH)(report.report)
app.command(rich_help_panel=WATCH)(compare.compare)
app.command(rich_help_panel=WATCH)(snapshot.snapshot)
app.command(rich_help_panel=WATCH)(runs.cancel)
app.add_typer(sweep_verbs.app, name="sweep", rich_help_panel=WATCH)
app.command(rich_help_panel=WATCH)(resume.resume)
app.command(rich_help_panel=WATCH)(runs.clean)
app.command(rich_help_panel=WATCH)(doctor.doctor)
app.command(rich_help_panel=FILES)(export.export)
app.add_typer(job.app, name="job", rich_help_panel=FILES)
app.add_typer(clusters.app, name="clusters", rich_help_panel=FILES)
app.add_typer(images.app, name="images", rich_help_panel=FILES)
app.add_typer(render.templates_app, name="templates", rich_help_panel=FILES)
app.add_typer(runpod.app, name="runpod", rich_help_panel=FILES)
app.command(rich_help_panel=FILES)(job.schema)


def main() -> None:
    """Run the console script, after its imports.

    If torch was imported, the process exits without finalizing the interpreter, which would take time and
    make libraries print what they have leaked (nanobind in triton: 27 lines).
    """
    gc.set_threshold(100_000)  # imports make half a million permanent objects: a tenth of a short verb's time
    try:
        _main()
    except SystemExit as end:
        if "torch" not in sys.modules:
            raise
        _exit_without_finalizing(end.code)


def _with_only(verb: str) -> typer.Typer:
    """Return the program with this verb only, or with all verbs if none has this name.

    At each start, typer creates the options of all verbs, which takes a tenth of the time of a short verb.
    """
    commands = [command for command in app.registered_commands if _name_of(command) == verb]
    groups = [group for group in app.registered_groups if group.name == verb]
    if not commands and not groups:
        return app
    app_of_verb = copy.copy(app)
    app_of_verb.registered_commands, app_of_verb.registered_groups = commands, groups
    return app_of_verb


def _name_of(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def _exit_without_finalizing(code: str | int | None) -> NoReturn:
    """Exit like `SystemExit(code)`, but do not wait for threads: only a task's code leaves some behind."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _main() -> None:
    """Run the command. An error of the user becomes one message and a documented exit code."""
    _open_missing_streams()
    make_output_harmless()
    listen(LongWork(plain="--json" not in sys.argv))
    try:
        try:
            _with_only(sys.argv[1] if len(sys.argv) > 1 else "")()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _exit_after_broken_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich exit with 1
            _exit_after_broken_pipe()
        raise
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        fail(message_of(error), code)
    except KeyboardInterrupt:
        sys.exit(130)


def _open_missing_streams() -> None:
    """Replace a closed standard stream (`>&-`), which is None in Python, by one that discards its data."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _exit_after_broken_pipe() -> NoReturn:
    """Exit after the reader of a pipe has gone, as in `| head`. SIGPIPE itself must stay ignored: otherwise a
    server that closes its connection would end this process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(128 + signal.SIGPIPE)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error of the user, or None for a bug in launcher (to show its traceback)."""
    from launcher.images import ImageError
    from launcher.rundir.find import RunNotFoundError
    from launcher.schedulers.base import UnclearError
    from launcher.spec.errors import LauncherError, RefusedError

    if isinstance(error, UnclearError):
        return EXIT_UNCLEAR
    if isinstance(error, RefusedError | ImageError):
        return EXIT_REFUSED
    if isinstance(error, RunNotFoundError):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, LauncherError | OSError) else None
