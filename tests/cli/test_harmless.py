"""What a job writes never steers the terminal of who looks at it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from launcher.cli.output import harmless_text
from tests.lab import Lab

STEERS = re.compile(rb"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]")
NASTY = "a \\x1b]0;PWNED\\x07 \\x1b[2J \\x9b2J \\x1bc \\x0e \\x08\\x08 z"
SCRIPT = f'import sys\nsys.stderr.write("{NASTY}\\n")\nraise ValueError("{NASTY}")\n'


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With one run that has failed with an exception full of control characters."""
    lab = Lab(tmp_path_factory.mktemp("harmless"))
    lab.script(SCRIPT)
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job(command="python train.py", resources=resources, recipe={"sharding": "none"})
    done = lab.cli("run", str(job))
    assert done.returncode == 17 and "ValueError" in done.stdout
    assert not STEERS.search((done.stdout + done.stderr).encode())
    [verdict] = [attempt.verdict for attempt in lab.newest().attempts()]
    record = json.loads(verdict.read_text())
    record["exception"] = "ValueError: \x1b]0;PWNED\x07"  # as a task's rank writes it: to the letter
    verdict.write_text(json.dumps(record))
    return lab


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["why", "status", "list", "logs", "logs --supervisor", "why --json", "status --json"]
)
def test_no_verb_prints_what_steers_a_terminal(lab: Lab, verb: str) -> None:
    done = lab.cli(*verb.split())
    assert not STEERS.search((done.stdout + done.stderr).encode()), verb
    if verb == "why":
        assert "^[]0;PWNED^G" in done.stdout, "it is spelled out, and can be read"
    if verb == "why --json":
        assert "\x1b]0;PWNED\x07" in json.loads(done.stdout)["attempts"][0]["exception"], "the value is whole"


def test_an_error_message_is_spelled_out_as_well(lab: Lab) -> None:
    done = lab.cli("status", "no-\x1b[2Jrun")
    assert done.returncode == 3 and "\x1b" not in done.stderr and "[2J" in done.stderr


def test_colours_stay_and_end_with_their_line() -> None:
    assert harmless_text("\x1b[31mred\nplain") == "\x1b[31mred\x1b[0m\nplain"
    assert harmless_text("\udcff") == "\\udcff"


def test_the_width_is_that_of_columns(lab: Lab) -> None:
    lab.environ["COLUMNS"] = "60"
    lines = lab.cli("list").stdout.splitlines()
    assert lines and max(map(len, lines)) <= 60
    lab.environ["COLUMNS"] = "0"
    assert lab.newest().id in lab.cli("list").stdout


PRINTS = """\
import os, sys
from launcher.cli.output import make_output_harmless
make_output_harmless()
print("out")
print("err", file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_leaves_the_process_as_early_as_before(unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run([sys.executable, "-c", PRINTS], env=env, capture_output=True, text=True)
    assert done.stderr == "err\n" and done.stdout == ("out\n" if unbuffered else "")


PRINTS_MORE = """\
from launcher.cli.output import console, make_output_harmless, print_json
make_output_harmless()
print("loss \u2192 0")
console().print("caf\xe9 \U0001f642")
print_json("caf\xe9 \U0001f642")
"""


def test_characters_that_the_locale_lacks_are_spelled_out() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", PRINTS_MORE], env=env, capture_output=True, text=True)
    printed, table, value = done.stdout.splitlines() or ["", done.stderr, ""]
    assert (printed, table) == (r"loss \u2192 0", r"caf\xe9 \U0001f642")
    assert json.loads(value) == "café \U0001f642"
