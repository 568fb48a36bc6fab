"""Which versions are installed, and whether they fit together: from the files of packages, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.doctor.values import finding

ASK = (
    "import json; from launcher.doctor.measure.host import bitsandbytes_version, torch_version; "
    "print(json.dumps([torch_version(), bitsandbytes_version()]))"
)


def package(
    site: Path,
    name: str,
    version: str,
    requires: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
) -> None:
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (about / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    for file, text in {"__init__.py": "", **(files or {})}.items():
        (site / name).mkdir(exist_ok=True)
        (site / name / file).write_text(text)


def versions(site: Path) -> list[dict[str, Any]]:
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", ASK], env=environ, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_torch_with_another_nccl_than_it_was_built_with(tmp_path: Path) -> None:
    pins = (
        'nvidia-nccl-cu12==2.28.9; platform_system == "Linux"',
        'nvidia-cublas-cu12==12.8.4.1; platform_system == "Linux"',
        "nvidia-absent-cu12==1.0",
        "filelock",
    )
    package(tmp_path, "torch", "2.13.0", pins, {"version.py": "cuda: Optional[str] = '12.8'\n"})
    package(tmp_path, "nvidia-nccl-cu12", "2.26.2")
    package(tmp_path, "nvidia-cublas-cu12", "12.8.4.1")
    package(tmp_path, "bitsandbytes", "0.50.2", files={"libbitsandbytes_cuda130.so": ""})
    torch, bitsandbytes = versions(tmp_path)
    assert (torch["torch"], torch["cuda"], torch["nccl"]) == ("2.13.0", "12.8", "2.26.2")
    assert torch["misfits"] == ["nvidia-nccl-cu12 2.26.2 instead of 2.28.9"]
    assert bitsandbytes == {"version": "0.50.2", "cuda": ["13.0"], "torch": "12.8"}
    told = finding("torch", torch)
    assert (told.verdict, told.measured) == ("poor", "2.13.0, CUDA 12.8, NCCL 2.26.2")
    assert "2.26.2 instead of 2.28.9" in told.cause and told.cure
    other = finding("bitsandbytes", bitsandbytes)
    assert other.verdict == "poor" and "built for CUDA 13.0, and torch for 12.8" in other.cause


def test_what_is_installed_here_fits_together() -> None:
    torch, bitsandbytes = versions(Path("/nonexistent"))
    assert torch["misfits"] == [] and finding("torch", torch).verdict == "good"
    assert finding("bitsandbytes", bitsandbytes).verdict == "good"


def test_a_launcher_without_package_metadata_is_source() -> None:
    ask = "from launcher.doctor.measure.host import launcher_version; print(launcher_version())"
    with_metadata = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert with_metadata.stdout.strip() == version("gpu-launcher")
    hidden = (
        "import importlib.metadata as m\n"
        "def absent(name): raise m.PackageNotFoundError(name)\n"
        f"m.version = absent\n{ask}"
    )
    without = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)
    assert without.stdout.strip() == "source"
