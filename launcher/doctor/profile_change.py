"""Write settings into a cluster profile, each with its reason. Comments and order are preserved."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from launcher.doctor.facts import Facts
from launcher.doctor.trailing_comments import replace_comment, trailing_comments_kept
from launcher.spec.errors import UsageError

INDENTED_LIST = r"^( *)[\w-]+:[^\n]*\n(?: *#[^\n]*\n)*\1  +- "
"A list that is indented more than its key."
WIDE = 4096
"Line width for the YAML writer, so large that no line is wrapped."


def changed(text: str, facts: Facts) -> str:
    """Return a profile with the facts in `network.env` and `node.gpu`, and a comment with each reason.

    Return the same text if it has them already. Raises UsageError if another value would change.
    """
    wanted = _plain(text)
    if facts.env:
        network = wanted["network"] = dict(wanted.get("network") or {})
        network["env"] = {**(network.get("env") or {}), **facts.env}
    corrects_gpu = bool(facts.gpu_type) and "gpu" in (wanted.get("node") or {})
    if corrects_gpu:
        old = wanted["node"]["gpu"]
        gpu = {**(old if isinstance(old, dict) else {}), "type": facts.gpu_type, "memory": facts.gpu_memory}
        wanted["node"] = {**wanted["node"], "gpu": gpu}
    if wanted == _plain(text):
        return text
    yaml = _like(text)
    profile = yaml.load(_without_reason(text, facts.env)) or CommentedMap()
    if facts.env:
        with trailing_comments_kept(profile, "network", "env"):
            inside = _mapping(profile, "network", "env")
            inside.update(facts.env)
        first = next(iter(facts.env))
        indent = inside.lc.col or 2 * (yaml.map_indent or 2)
        inside.yaml_set_comment_before_after_key(first, before=facts.why_env, indent=indent)
    if corrects_gpu:
        with trailing_comments_kept(profile, "node", "gpu"):
            gpu = _mapping(profile, "node", "gpu")
            gpu |= {"type": facts.gpu_type, "memory": facts.gpu_memory}
            replace_comment(gpu, "type", facts.why_gpu)
            replace_comment(gpu, "memory")
    out = io.StringIO()
    yaml.dump(profile, out)
    if _plain(out.getvalue()) != wanted:
        raise UsageError(
            "the profile cannot be changed without changing other values; add to network.env by hand: "
            + " ".join(f"{name}={value}" for name, value in facts.env.items())
        )
    return out.getvalue()


def _plain(text: str) -> dict[str, Any]:
    """Return the values of a profile."""
    return YAML(typ="safe", pure=True).load(text) or {}


def _like(text: str) -> YAML:
    """Return a writer that indents as this profile does."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDE
    step = re.search(r"^[\w-]+:[^\n]*\n(?:\s*#[^\n]*\n|\n)*( +)[\w-]+:", text, re.M)
    mapping = len(step[1]) if step is not None else 2
    indented = re.search(INDENTED_LIST, text, re.M) is not None
    yaml.indent(mapping=mapping, sequence=mapping + 2 if indented else 2, offset=mapping if indented else 0)
    return yaml


def _without_reason(text: str, names: Iterable[str]) -> str:
    """Return the profile without the reason that an earlier run of the doctor wrote above these names."""
    keys = "|".join(map(re.escape, names))
    return re.sub(rf"^ *# launcher doctor, [^\n]*\n(?= *(?:{keys}):)", "", text, flags=re.M) if keys else text


def _mapping(profile: CommentedMap, *keys: str) -> CommentedMap:
    """Return the mapping below these keys, in block style. Missing keys are added.

    A mapping that is shared through an alias or a merge key is copied, so that other places do not change.
    """
    at = profile
    for key in keys:
        found = at.get(key)
        if not isinstance(found, CommentedMap):
            at[key] = found = CommentedMap()
        elif _uses(profile, found) > 1:
            at[key] = found = CommentedMap(found)
        if found.fa.flow_style() or not found:
            found.fa.set_block_style()
            found.lc.col = None  # it was the column of the bracket
        at = found
    return at


def _uses(tree: object, wanted: CommentedMap) -> int:
    """Return how often a mapping is part of the profile."""
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return (tree is wanted) + sum(_uses(one, wanted) for one in inside)


def difference(before: str, after: str, name: str) -> str:
    """Return the difference as a patch."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, name, name))


def own_file(file: Path, shipped: Path) -> Path:
    """Return the file to write for a profile. For a shipped one, it is a user's file that overrides it."""
    if file.resolve().parent != shipped.resolve():
        return file
    return Path(platformdirs.user_config_dir("launcher")) / "clusters" / file.name
