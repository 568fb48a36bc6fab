"""Collect the wheels that a machine without a network needs for a day on a GPU.

Python 3.12 on Linux x86-64. torch is left out, because the machine has one for its driver; so is every
package in `--have`, a file as `pip list --format=freeze` on that machine writes it. Versions are those of
constraints.txt.
"""

from __future__ import annotations

import argparse
import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.rundir.versions import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("", "train", "tasks", "float8")
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
LEFT_OUT = ("torch", DISTRIBUTION)
THERE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
    "os_name": "posix",
}
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
"Minor versions of glibc 2 in the names of wheels: pip takes each only if it is named."
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--have", type=Path, metavar="FILE", help="packages that the machine has")
    options = parser.parse_args()
    done = {*LEFT_OUT, *(_names(options.have) if options.have else ())}
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [*_of_launcher(), *map(Requirement, TESTS)]
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if name not in done:
            done.add(name)
            wanted += _needs(_fetched(one, options.folder), one.extras)
    files = sorted(options.folder.glob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / MIB:7.1f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / MIB:7.1f} MiB in {len(files)} wheels")
    return 0


def _of_launcher() -> Iterator[Requirement]:
    for one in map(Requirement, requires(DISTRIBUTION) or ()):
        if one.marker is None or any(one.marker.evaluate({**THERE, "extra": extra}) for extra in EXTRAS):
            yield one


def _fetched(one: Requirement, folder: Path) -> Path:
    """Download one wheel without what it needs. Return its file."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms,
               "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64",
               "-c", str(ROOT / "constraints.txt"), "-d", str(folder),
               f"{one.name}{one.specifier}"]  # fmt: skip
    subprocess.run(command, check=True)
    name = canonicalize_name(one.name)
    return next(file for file in folder.glob("*.whl") if canonicalize_name(file.name.split("-")[0]) == name)


def _needs(wheel: Path, extras: set[str]) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as content:
        name = next(one for one in content.namelist() if one.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(content.read(name))
    for one in map(Requirement, about.get_all("Requires-Dist") or ()):
        if one.marker is None or any(
            one.marker.evaluate({**THERE, "extra": extra}) for extra in ("", *extras)
        ):
            yield one


def _names(file: Path) -> Iterator[str]:
    for line in file.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            yield canonicalize_name(line.partition("==")[0].partition(" @ ")[0].strip())


if __name__ == "__main__":
    raise SystemExit(main())
