"""What rsync starts in the place of ssh: greetings of a login shell do not reach its protocol.

Standard library only; it runs as a program of its own.
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

quote = shlex.quote


def environment(ssh: list[str], prepare: str) -> dict[str, str]:
    """For rsync. `ssh` is the command up to the host; `prepare` runs there before rsync does."""
    return {
        **os.environ,
        "RSYNC_RSH": f'"{sys.executable}" "{Path(__file__).resolve()}"',
        "LAUNCHER_SSH": json.dumps({"ssh": ssh, "prepare": prepare}),
    }


def through_any_shell(script: str) -> str:
    """A command that runs `script` in sh, with no character that sh, csh or fish would take for its own."""
    octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(script))
    return f'sh -c \'eval "$(printf "{octal}")"\''


def main() -> int:
    """Arguments as rsync gives them: options and a host, which are ours already, then its own command."""
    about = json.loads(os.environ["LAUNCHER_SSH"])
    mark = secrets.token_hex(8)
    server = shlex.join(sys.argv[sys.argv.index("rsync") :])
    script = f"echo {mark}; {about['prepare']}exec {server}"
    with subprocess.Popen([*about["ssh"], through_any_shell(script)], stdout=subprocess.PIPE) as process:
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
