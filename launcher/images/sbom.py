"""List the parts of an image as CycloneDX 1.6: `python -m launcher.images.sbom FILE`, run during its build.

It lists what is actually installed: Python's distributions and Debian's packages. It runs with the image's
own Python and the standard library. The same image gives the same file: there is no random serial number, and
the time is SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.rundir.versions import DISTRIBUTION

DPKG_STATUS = Path("/var/lib/dpkg/status")


def sbom(os_release: dict[str, str]) -> dict[str, Any]:
    parts = [*python_parts(), *debian_parts(os_release)]
    version = next(part["version"] for part in parts if part["name"] == DISTRIBUTION)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
            ),
            "component": {"type": "container", "name": "launcher", "version": version},
        },
        "components": sorted(parts, key=lambda part: str(part["bom-ref"])),
    }


def python_parts() -> Iterator[dict[str, Any]]:
    seen = set()
    for item in metadata.distributions():
        name, version = item.metadata["Name"].lower().replace("_", "-"), item.version
        purl = f"pkg:pypi/{name}@{quote(version, safe='')}"
        if purl not in seen:
            seen.add(purl)
            licence = item.metadata.json.get("license_expression")
            yield _part(name, version, purl, licence if isinstance(licence, str) else None)


def debian_parts(os_release: dict[str, str]) -> Iterator[dict[str, Any]]:
    if not DPKG_STATUS.is_file():
        return
    distro = f"{os_release.get('ID', 'linux')}-{os_release.get('VERSION_ID', '0')}"
    for paragraph in DPKG_STATUS.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " "
        )
        if fields.get("Status") == "install ok installed":
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/{os_release.get('ID', 'debian')}/{quote(name)}@{quote(version, safe='')}"
            yield _part(name, version, f"{purl}?arch={arch}&distro={distro}", None)


def _part(name: str, version: str, purl: str, licence: str | None) -> dict[str, Any]:
    part: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    return part | ({"licenses": [{"expression": licence}]} if licence else {})


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1]).write_text(
        json.dumps(sbom(platform.freedesktop_os_release()), indent=1) + "\n", encoding="utf-8"
    )
