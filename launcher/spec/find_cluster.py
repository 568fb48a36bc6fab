"""Find a cluster profile by name: first the project's profiles, then the user's, then the shipped ones."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from launcher.spec.errors import Problem, SpecError
from launcher.spec.similar import did_you_mean

SUFFIX = ".yaml"


def cluster_folders(shipped: Path) -> list[Path]:
    """Return the folders of profiles, in order of precedence."""
    user = Path(platformdirs.user_config_dir("launcher")) / "clusters"
    return [Path("clusters"), user, shipped]


def find_clusters(folders: list[Path]) -> dict[str, Path]:
    """Return the file of every profile by name. If a name occurs twice, the first folder wins."""
    profiles: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            for file in sorted(folder.glob(f"*{SUFFIX}")):
                profiles.setdefault(file.stem, file)
    return profiles


def find_cluster(name: str, folders: list[Path]) -> Path:
    """Return the file of a profile. `name` may also be a path. Raises SpecError if it does not exist."""
    if name.endswith((SUFFIX, ".yml")) or "/" in name:
        path = Path(name)
        if path.is_file():
            return path
        raise SpecError([Problem(name, "", "no such cluster profile")])
    profiles = find_clusters(folders)
    if name in profiles:
        return profiles[name]
    hint = did_you_mean(name, profiles) or f"known: {', '.join(sorted(profiles))}"
    looked = ", ".join(str(folder) for folder in folders)
    raise SpecError([Problem(name, "", f"no such cluster; {hint} (looked in {looked})")])
