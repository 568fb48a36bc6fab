"""Put settings into a cluster profile, with the reason beside them. Comments and order stay."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping
from pathlib import Path

import platformdirs
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

INDENTED_LIST = r"^( *)[\w-]+:[^\n]*\n(?: *#[^\n]*\n)*\1  +- "
"A list that is indented more than its key."
WIDE = 4096
"Longer lines than any profile has, so that none is wrapped."


def changed(text: str, env: Mapping[str, str], reason: str) -> str:
    """Return a profile with `network.env` extended by `env`, and a comment with the reason above it."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDE
    if re.search(INDENTED_LIST, text, re.M):
        yaml.indent(mapping=2, sequence=4, offset=2)
    profile = yaml.load(text) or CommentedMap()
    network = _mapping(profile, "network")
    inside = _mapping(network, "env")
    for name, value in env.items():
        inside[name] = value
    first = next(iter(env))
    inside.yaml_set_comment_before_after_key(first, before=reason, indent=inside.lc.col or 4)
    out = io.StringIO()
    yaml.dump(profile, out)
    return out.getvalue()


def _mapping(above: CommentedMap, key: str) -> CommentedMap:
    """Return the mapping below a key, in block style. It is added if there is none."""
    if not isinstance(above.get(key), CommentedMap):
        above[key] = CommentedMap()
    found: CommentedMap = above[key]
    if found.fa.flow_style():
        found.fa.set_block_style()
    return found


def difference(before: str, after: str, name: str) -> str:
    """Return the difference as a patch."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, name, name))


def own_file(file: Path, shipped: Path) -> Path:
    """Return the file to write for a profile: for a shipped one, a file of the user, which wins over it."""
    if file.resolve().parent != shipped.resolve():
        return file
    return Path(platformdirs.user_config_dir("launcher")) / "clusters" / file.name
