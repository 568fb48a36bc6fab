"""`python -m launcher.supervise RUN_DIR`: the supervisor, which a job script starts once per node."""

# ruff: noqa: E402
from __future__ import annotations

import signal

# Block the signals before the slow imports, so that an early signal waits for the supervisor's handlers.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.rundir.layout import RunDir
from launcher.rundir.secret_masking import masked_text
from launcher.spec import variables
from launcher.spec.events import Finished
from launcher.spec.verdict import EXIT_CODES, EXIT_TAKEN, Verdict
from launcher.supervise.attempt import NodePlace
from launcher.supervise.final_report import write_last_page
from launcher.supervise.host import AlreadySupervisedError, supervisor_lock
from launcher.supervise.journal import Journal
from launcher.supervise.nodes import NodesError
from launcher.supervise.secrets import SecretError, read_secrets
from launcher.supervise.supervisor import RunUnreadableError, Supervisor
from launcher.supervise.takeover import close_attempts

EXPECTED = (RunUnreadableError, AlreadySupervisedError, SecretError, NodesError)
"Errors that are printed without a traceback."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.supervise", description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rendezvous", help="address of node 0 as the other nodes reach it")
    parser.add_argument("--port-base", type=int, default=61000, help="61000-65535")
    parser.add_argument(
        "--stop-file", type=Path, help="file in which the batch script writes why the run should stop"
    )
    parser.add_argument(
        "--secrets-on-stdin",
        action="store_true",
        help="read a line with the secrets' values as a JSON object, and a second line with the token that "
        "authenticates supervisors of hosts without a shared folder; other secrets are read on this host",
    )
    options = parser.parse_args()
    if options.nodes > 1 and not options.rendezvous:
        parser.error("several nodes need --rendezvous: the address of node 0")
    run = RunDir(Path(options.run_dir).absolute())
    place = NodePlace(options.node_rank, options.nodes, options.rendezvous, options.port_base)
    try:
        about = run.read_about()
        if about.id is None:
            raise RunUnreadableError(f"{run.path} has no readable run.json: it is not a run directory")
        declared = about.job.validated().secrets
        given_secrets, token = _read_stdin() if options.secrets_on_stdin else ({}, "")
        if variables.SECRETS_BY_NAME in os.environ:
            names = [secret.name for secret in declared if secret.name in os.environ]
            given_secrets |= {name: os.environ[name] for name in names}
        secrets = read_secrets(declared, given_secrets)
        link = None
        if about.apart and place.count > 1:
            place = replace(place, no_shared_folder=True)
            from launcher.supervise.no_shared_folder.link import mirror  # here, because few runs need it

            if not token:
                raise NodesError("the hosts of this run share no folder: start it by `launcher resume`")
            link = mirror(run, place, token)  # before the lock, which shows others that the start worked
        with supervisor_lock(run, place.rank):
            try:
                code = Supervisor(run, place, secrets, options.stop_file, link).main()
            except EXPECTED:
                raise
            except Exception as error:
                code = _crashed(run, place, secrets, error)
    except EXPECTED as error:
        print(f"[launcher] {error}", file=sys.stderr)
        return EXIT_TAKEN if isinstance(error, AlreadySupervisedError) else 2
    if place.rank == 0:
        write_last_page(run)  # without the lock, so that the run can be resumed in the meantime
    return code


def _crashed(run: RunDir, place: NodePlace, secrets: Mapping[str, str], error: Exception) -> int:
    """Record that the run failed and why. No other record would exist. The ranks end with this process."""
    masked_values = {**secrets, variables.SECRETS: ",".join(secrets)}
    sys.stderr.write(masked_text(traceback.format_exc(), masked_values))
    if place.rank == 0:
        error_text = masked_text(f"{type(error).__name__}: {error}", masked_values).partition("\n")[0]
        verdict = Verdict(
            failure="unknown",
            reason=f"the supervisor crashed ({error_text}): a defect of launcher, or damaged records",
            node=0,
            evidence=(run.supervisor_log.name,),
        )
        then = f"the traceback is in {run.supervisor_log}; please report it"
        journal = Journal(run)
        close_attempts(run, journal, verdict, then)
        ended = {"failure": verdict.failure, "reason": verdict.reason}
        journal.event(Finished(state="failed", failure=verdict.failure, reason=verdict.reason))
        journal.state("failed", **ended, then=then)
        journal.close()
    return EXIT_CODES["unknown"]


def _read_stdin() -> tuple[dict[str, str], str]:
    return json.loads(sys.stdin.readline()), sys.stdin.readline().strip()


if __name__ == "__main__":
    sys.exit(main())
