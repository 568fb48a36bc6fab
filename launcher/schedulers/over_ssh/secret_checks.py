"""Check in shell that a run's secrets are on the host where the run starts."""

from __future__ import annotations

from shlex import quote

from launcher.spec.records import RunRecord
from launcher.supervise.secrets import LONGEST


def secret_checks(about: RunRecord) -> list[str]:
    """Return shell that checks that the source of each secret of run.json exists on the cluster.

    A secret's value is read there and never sent. Variables that the profile's `setup:` sets cannot be
    checked, because those lines run only in the job.
    """
    checks = []
    for secret in about.job.validated().secrets:
        name, file = secret.name, secret.file
        if file is not None:
            path = f'"$HOME"/{quote(file[2:])}' if file.startswith("~/") else quote(file)
            message = (
                f"{name}: its file {file} is not there, cannot be read, or is not UTF-8 text of at most "
                f"{LONGEST // 1024} KiB without NUL bytes"
            )
            check = file_check(path, LONGEST - len(name) - 2)
            checks.append(f"{{ {check} || {{ echo {quote(f'secrets: {message}')}; false; }}; }}")
        elif not about.cluster.setup:
            source = secret.env or name
            message = (
                f"{name}: the environment variable {source} is not set there; secrets are never sent: export "
                "it in a start-up file of yours there, or name a `file:` there"
            )
            checks.append(
                f'{{ [ -n "${{{source}+x}}" ] || {{ echo {quote(f"secrets: {message}")}; false; }}; }}'
            )
    return checks


def file_check(path: str, longest: int) -> str:
    """Return shell that checks, like `read_secret_file`, whether a file's content can be a secret's value.

    `path` is quoted.
    """
    without_nul = f"$(head -c {longest} {path} | tr -d '\\000' | wc -c)"
    utf8 = f"{{ ! command -v iconv >/dev/null || iconv -f UTF-8 -t UTF-8 {path} >/dev/null 2>&1; }}"
    no_nul_bytes = f'[ "{without_nul}" -eq "$(wc -c <{path})" ]'
    return f"{{ [ -f {path} ] && [ -r {path} ] && [ -s {path} ] && {no_nul_bytes} && {utf8}; }}"
