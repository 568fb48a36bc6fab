"""`python containers/lock.py NAME [PIP OPTION...]`: write the lock file of an image of the catalogue anew.

Run it with the image's Python version on linux/amd64, where hatchling is installed. Every package gets the
one wheel that pip chooses there, with its hash; a source distribution is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from launcher.images.catalogue import Catalogue, Image, find_image
from launcher.spec.load import read, validate

HERE = Path(__file__).resolve().parent
INIT = "dumb-init"
"The first process of an image: it reaps orphans and passes signals on."


def main() -> None:
    images = validate(Catalogue, read(HERE / "images.yaml")).images
    image = find_image(sys.argv[1], images)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != image.python:
        sys.exit(f"{image.name} has Python {image.python}; this is {here}")
    text = lock(image, sys.argv[2:])
    (HERE / image.lock).write_text(text, encoding="utf-8")
    print(f"{image.lock}: {text.count('==')} packages")


def lock(image: Image, options: list[str]) -> str:
    extras = f"[{','.join(image.extras)}]" if image.extras else ""
    wanted = [f"{HERE.parent}{extras}", f"torch=={image.torch}", INIT]
    index = ["--extra-index-url", image.torch_index] if image.torch_index else []
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
        *("--no-build-isolation", "--only-binary", ":all:", "--report", "-"),
        *("--constraint", str(HERE.parent / "constraints.txt"), *index, *options, *wanted),
    ]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    found = {}
    for item in report["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name != "launcher" and name not in image.without:
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            found[name] = item["metadata"]["version"], digest
    head = [
        f"# Of {image.name}: Python {image.python}, linux/amd64. Written by containers/lock.py; do not edit.",
        *([f"--extra-index-url {image.torch_index}"] if image.torch_index else []),
    ]
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, (version, digest) in sorted(found.items())]
    return "\n".join([*head, *lines]) + "\n"


if __name__ == "__main__":
    main()
