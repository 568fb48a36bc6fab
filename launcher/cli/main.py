"""`launcher VERB`. Each verb is a function in a module of this room."""

from __future__ import annotations

import os
import signal
import sys

import typer

from launcher import __version__
from launcher.cli import (
    clusters,
    export,
    images,
    job,
    logs,
    plan,
    render,
    resume,
    runpod,
    runs,
    snapshot,
    submit,
)
from launcher.cli.output import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNCLEAR, fail

app = typer.Typer(
    name="launcher",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Takes a training job and a cluster, makes it fit into GPU memory, submits it, watches it, "
    "and keeps it running when memory runs out.",
)


def _version(asked: bool) -> None:
    if asked:
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
app.command(rich_help_panel=START)(submit.submit)
app.command(rich_help_panel=START)(submit.run)
app.command(rich_help_panel=START)(plan.plan)
app.command(rich_help_panel=START)(render.render)
app.command("list", rich_help_panel=WATCH)(runs.list_runs)
app.command(rich_help_panel=WATCH)(runs.status)
app.command(rich_help_panel=WATCH)(logs.logs)
app.command(rich_help_panel=WATCH)(logs.why)
app.command(rich_help_panel=WATCH)(snapshot.snapshot)
app.command(rich_help_panel=WATCH)(runs.cancel)
app.command(rich_help_panel=WATCH)(resume.resume)
app.command(rich_help_panel=WATCH)(runs.clean)
app.command(rich_help_panel=FILES)(export.export)
app.add_typer(job.app, name="job", rich_help_panel=FILES)
app.add_typer(clusters.app, name="clusters", rich_help_panel=FILES)
app.add_typer(images.app, name="images", rich_help_panel=FILES)
app.add_typer(render.templates_app, name="templates", rich_help_panel=FILES)
app.add_typer(runpod.app, name="runpod", rich_help_panel=FILES)
app.command(rich_help_panel=FILES)(job.schema)


def main() -> None:
    """The console script: errors that a user can mend are one message and a documented exit code."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`. Not SIGPIPE: a server that hangs up must not end us
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        fail(_message(error), code)
    except KeyboardInterrupt:
        sys.exit(130)


def _message(error: Exception) -> str:
    """The system's errors without their number, with the file where one is known."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _exit_code(error: Exception) -> int | None:
    """For errors meant for the user; None for a defect of launcher, which shows its traceback."""
    from launcher.images import ImageError
    from launcher.planning.plan import PlanRefusedError
    from launcher.render.render import RenderError
    from launcher.runs.find import RunNotFoundError
    from launcher.schedulers.base import SchedulerError, UnclearError
    from launcher.spec.errors import SpecError

    if isinstance(error, UnclearError):
        return EXIT_UNCLEAR
    if isinstance(error, PlanRefusedError | SchedulerError | ImageError):
        return EXIT_REFUSED
    if isinstance(error, RunNotFoundError):
        return EXIT_NOT_FOUND
    if isinstance(error, SpecError | RenderError | OSError):
        return 2
    return None
