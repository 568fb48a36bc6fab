"""Put settings into a cluster profile, with the reason beside them. Comments and order stay."""

from __future__ import annotations

import difflib
import io
import re
from pathlib import Path

import platformdirs
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from launcher.doctor.facts import Facts

INDENTED_LIST = r"^( *)[\w-]+:[^\n]*\n(?: *#[^\n]*\n)*\1  +- "
"A list that is indented more than its key."
WIDE = 4096
"Longer lines than any profile has, so that none is wrapped."


def changed(text: str, facts: Facts) -> str:
    """Return a profile with the facts in `network.env` and `node.gpu`, and a comment with each reason."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDE
    if re.search(INDENTED_LIST, text, re.M):
        yaml.indent(mapping=2, sequence=4, offset=2)
    profile = yaml.load(text) or CommentedMap()
    if facts.env:
        inside = _mapping(_mapping(profile, "network"), "env")
        inside.update(facts.env)
        first = next(iter(facts.env))
        inside.yaml_set_comment_before_after_key(first, before=facts.why_env, indent=inside.lc.col or 4)
    if facts.gpu_type and isinstance(node := profile.get("node"), CommentedMap) and "gpu" in node:
        gpu = _mapping(node, "gpu")
        gpu |= {"type": facts.gpu_type, "memory": facts.gpu_memory}
        for name in ("type", "memory"):
            gpu.ca.items.pop(name, None)  # a guess, and why
        gpu.yaml_add_eol_comment(facts.why_gpu, "type")
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
