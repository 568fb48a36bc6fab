"""`launcher why`."""

from __future__ import annotations

import shlex
from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName


def why(
    run: RunName = None,
    log: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--log", metavar="FILE", help="explain the output of any program instead; - reads standard input"
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show why a run failed: class, rank, phase, exception, what launcher did and what you can do; then the
    history."""
    from launcher.cli.output import fail, print_json

    if log is not None:
        if run is not None:
            fail("give a run or --log, not both")
        return _why_log(log, json)
    from launcher.report.history import history
    from launcher.report.why import verdicts
    from launcher.report.why import why as explain
    from launcher.rundir.find import find_run
    from launcher.schedulers.lookup import scheduler_of

    run_dir = find_run(run, by_job=True)
    status = scheduler_of(run_dir).status(run_dir)
    if json:
        attempts = [{"attempt": n, **v.model_dump(), "then": then} for n, v, then in verdicts(run_dir)]
        print_json(
            {"run_id": run_dir.id, "state": status.state, "reason": status.reason, "attempts": attempts}
        )
        return None
    print("\n".join([*explain(run_dir, status), *history(run_dir)]))
    return None


_COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"\xfd7zXZ": "xzcat",
    b"BZh": "bzcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"PK\x03\x04": "unzip -p",
}
"First bytes of a compressed file, and the command that prints it."


def _why_log(name: str, json: bool) -> None:
    from launcher.cli.output import fail, print_json
    from launcher.diagnosis.lines import lines_of
    from launcher.report.why_log import as_json, judged_log, why_log

    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            first_bytes = file.peek(8)
            for magic, tool in _COMPRESSED.items():
                if first_bytes.startswith(magic):
                    fail(f"--log {name} is compressed: {tool} {shlex.quote(name)} | launcher why --log -")
            cause = judged_log(lines_of(file))
    except OSError as error:
        fail(f"--log {name}: {error.strerror}")
    if json:
        print_json({"log": name, **as_json(cause)})
    else:
        print("\n".join(why_log("stdin" if name == "-" else name, cause)))
