"""The program that rsync starts in place of ssh. It keeps a login shell's greeting out of rsync's protocol.

It runs as a separate program, so it uses only the standard library.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

VARIABLE = "LAUNCHER_SSH"
"Holds the options of ssh as JSON."


def environment(ssh: list[str], prepare: str) -> dict[str, str]:
    """Return the environment for rsync.

    `ssh` is the command up to the host; `prepare` is shell that runs before rsync.
    """
    return {
        **os.environ,
        "RSYNC_RSH": f'"{sys.executable}" "{Path(__file__).resolve()}"',
        VARIABLE: json.dumps({"ssh": ssh, "prepare": prepare}),
    }


def through_any_shell(script: str) -> str:
    """Return a command that runs `script` in sh, without characters that sh, csh or fish would interpret."""
    octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(script))
    return f'sh -c \'eval "$(printf "{octal}")"\''


def unpack(size: int, folder: str, mode: str = "-xf") -> str:
    """Return shell that unpacks a tar, the next `size` bytes of stdin, into `folder`. Fails if fewer come.

    tar alone would not notice a connection that breaks between two files. `folder` is quoted for the shell.
    """
    tar = f"{folder}/.parcel.tar"
    return (
        f'( head -c {size} >{tar} && [ "$(wc -c <{tar})" -eq {size} ] && tar -C {folder} {mode} {tar}; '
        f"code=$?; rm -f {tar}; exit $code )"
    )


def main() -> int:
    """Take rsync's arguments: options and a host, which LAUNCHER_SSH already holds, then its remote
    command."""
    settings = json.loads(os.environ[VARIABLE])
    mark = secrets.token_hex(8)
    server = shlex.join(sys.argv[sys.argv.index("rsync") :])
    script = f"echo {mark}; {settings['prepare']}exec {server}"
    with subprocess.Popen([*settings["ssh"], through_any_shell(script)], stdout=subprocess.PIPE) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        for line in iter(process.stdout.readline, b""):
            if line.strip().endswith(mark.encode()):
                break
        while block := process.stdout.read1(65536):
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
