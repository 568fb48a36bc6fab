"""`launcher runpod sandbox`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def sandbox(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--folder",
            metavar="DIR",
            help="keep volumes, logs and the bill here",
            show_default="~/.cache/launcher/runpod-sandbox",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="listen on this port of 127.0.0.1; 0 takes a free one")
    ] = 8765,
    fault: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--fault",
            metavar="NAME=P[:VALUE][xTIMES]",
            help="cause a fault, e.g. no-capacity=0.3; may be repeated",
        ),
    ] = None,
    faults: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="read faults from a YAML or JSON file"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the random faults")] = 0,
    provisioning: Annotated[
        float, typer.Option(metavar="SECONDS", help="time until a pod has its machine")
    ] = 1.0,
    pull: Annotated[float, typer.Option(metavar="SECONDS", help="time until a pod's image is pulled")] = 1.0,
    restart: Annotated[
        float, typer.Option(metavar="SECONDS", help="time until a command that has returned is started again")
    ] = 1.0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="time between SIGTERM and SIGKILL when a pod is ended")
    ] = 10.0,
    per_minute: Annotated[int, typer.Option(help="requests per minute; further ones get status 429")] = 600,
    openapi: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            envvar="RUNPOD_OPENAPI",
            help="check requests against RunPod's OpenAPI document (/v2/openapi.json)",
        ),
    ] = None,
) -> None:
    """Run a local server that answers as RunPod does: its pods are local processes, and nothing is rented."""
    from launcher.cli.output import fail

    try:
        from launcher.sandbox.cloud import Pace
        from launcher.sandbox.faults import Fault, parse, read
        from launcher.sandbox.server import Options, serve
    except ModuleNotFoundError as error:
        fail(
            f"the sandbox needs {error.name}: install launcher's checkout with the extra `sandbox`: "
            "pip install '.[sandbox]' in it",
            2,
        )
    import platformdirs

    from launcher.spec.errors import SpecError
    from launcher.spec.load import read_plain

    data_folder = folder or Path(platformdirs.user_cache_dir("launcher")) / "runpod-sandbox"
    all_faults: dict[str, Fault] = {}
    try:
        if faults is not None:
            all_faults.update(read(read_plain(faults)))
        all_faults.update(dict(parse(text) for text in fault or []))
        options = Options(
            data_folder,
            port,
            openapi,
            Pace(provisioning, pull, restart, grace),
            per_minute,
            seed,
            all_faults,
        )
        serve(options, _print_variables)
    except (ValueError, SpecError) as error:
        fail(str(error), 2)


def _print_variables(folder: Path, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        print(f"export {name}={value}")
    print(f"# in another shell:  . {folder}/env.sh")
    print(f"# then, for example: launcher submit JOB -c {folder}/runpod-sandbox.yaml")
    print("# Ctrl-C ends the server and every pod.", flush=True)
