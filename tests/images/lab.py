"""What a build needs on this machine: buildah with a storage of its own, a base image, a folder of wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.images.catalogue import Image
from launcher.render.shipped import containers_dir

BASE = "localhost/debian-python:bookworm"
# Documentation and the like; unpacking them would take longer than all the rest.
LEFT_OUT = ("doc", "man", "locale", "i18n", "zoneinfo", "info")


class Storage:
    """Images and containers below one folder. Raises nothing: what is missing skips the test, and says so."""

    def __init__(self, folder: Path) -> None:
        for command in ("buildah", "mmdebstrap"):
            if shutil.which(command) is None:
                pytest.skip(f"{command} is not installed (tests/images/install.sh)")
        if os.getuid() != 0:
            pytest.skip("mmdebstrap makes the base image as root here")
        self.folder = folder
        # overlay shares what vfs copies, a gigabyte for each container; not every machine mounts one.
        for driver in ("overlay", "vfs"):
            self.env = self._environment(driver)
            container = self.buildah("from", "scratch", check=False).stdout.strip()
            if container and self.buildah("mount", container, check=False).returncode == 0:
                break
        else:
            pytest.skip("buildah finds no storage driver that works here")

    def _environment(self, driver: str) -> dict[str, str]:
        conf = self.folder / f"{driver}.conf"
        root = self.folder / driver
        conf.write_text(
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{root}/root"\nrunroot = "{root}/run"\n'
        )
        own = {"CONTAINERS_STORAGE_CONF": str(conf), "BUILDAH_ISOLATION": "chroot", "OMP_NUM_THREADS": "1"}
        inherited = {key: value for key, value in os.environ.items() if key != "STORAGE_DRIVER"}
        return {**inherited, **own, "XDG_CONFIG_HOME": str(self.folder / "config")}

    def buildah(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["buildah", *arguments], env=self.env, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"buildah {' '.join(arguments)}: {done.stderr}"
        return done

    def launcher(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launcher", *arguments]
        return subprocess.run(command, env=self.env, cwd=cwd or self.folder, capture_output=True, text=True)

    def base(self) -> None:
        """Debian 12 with Python 3.11, in the place of the catalogue's base, which is in a registry."""
        container = self.buildah("from", "scratch").stdout.strip()
        root = self.buildah("mount", container).stdout.strip()
        exclude = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
        done = subprocess.run(
            [
                *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io"),
                *('--aptopt=Acquire::Languages "none"', "--include=python3,python3-venv", *exclude),
                *("bookworm", root, "http://deb.debian.org/debian"),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.skip(f"no base image: {(done.stderr.strip().splitlines() or ['mmdebstrap failed'])[-1]}")
        self.buildah("umount", container)
        self.buildah("commit", "--rm", "--quiet", container, BASE)

    def build(self, image: Image, tool: str, tag: str, wheels: Path) -> None:
        """On that base, with packages from the folder alone."""
        options = ("--base", BASE, "--unpinned-base", "--wheels", str(wheels), "--with", tool, "--tag", tag)
        done = self.launcher("images", "build", image.name, *options)
        assert done.returncode == 0, done.stderr + done.stdout

    def end(self) -> None:
        self.buildah("rm", "--all", check=False)
        self.buildah("rmi", "--all", "--force", check=False)
        shutil.rmtree(self.folder)


def wheels(image: Image, folder: Path) -> Path:
    """Every package of the lock file, by its hash, from where pip finds packages on this machine."""
    lock = (containers_dir() / image.lock).read_text().splitlines()
    # torch's own index is asked only where the usual places have not got this torch: it may be out of reach.
    for kept in ([line for line in lock if not line.startswith("--extra-index-url")], lock):
        (folder / "lock.txt").write_text("\n".join(kept))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run(
            [*command, "--requirement", str(folder / "lock.txt"), "--dest", str(folder / "wheels")],
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return folder / "wheels"
    if "No matching distribution" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    raise AssertionError(done.stderr)
