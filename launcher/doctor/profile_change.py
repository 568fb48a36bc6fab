"""Write settings into a cluster profile, each with its reason. All other lines stay the same."""

from __future__ import annotations

import difflib
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from launcher.doctor.facts import Facts
from launcher.spec.errors import UsageError

Pair = tuple[Node, Node]
"A key of a mapping and its value."


def with_facts(text: str, facts: Facts) -> str:
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
    after = text if text.endswith("\n") else f"{text}\n"
    if facts.env:
        lines = {name: _lines(name, value) for name, value in facts.env.items()}
        first = next(iter(lines))
        lines[first] = f"# {facts.why_env}\n{lines[first]}"
        after = _with_lines(_without_reason(after, facts.env), ("network", "env"), lines)
    if corrects_gpu:
        type_, memory = _lines("type", facts.gpu_type), _lines("memory", facts.gpu_memory)
        after = _with_lines(after, ("node", "gpu"), {"type": f"{type_}  # {facts.why_gpu}", "memory": memory})
    try:
        as_wanted = _plain(after) == wanted
    except YAMLError:
        as_wanted = False
    if not as_wanted:
        raise UsageError(
            "the profile cannot be changed without changing other values; add to network.env by hand: "
            + " ".join(f"{name}={value}" for name, value in facts.env.items())
        )
    return after


def _plain(text: str) -> dict[str, Any]:
    """Return the values of a profile."""
    return YAML(typ="safe", pure=True).load(text) or {}


def _without_reason(text: str, names: Iterable[str]) -> str:
    """Return the profile without the reason that an earlier run of the doctor wrote above these names."""
    keys = "|".join(map(re.escape, names))
    return re.sub(rf"^ *# launcher doctor, [^\n]*\n(?= *(?:{keys}):)", "", text, flags=re.M)


def _with_lines(text: str, keys: Sequence[str], lines: Mapping[str, str]) -> str:
    """Return the profile with these lines, by key, in the mapping below `keys`: in place of a line of that
    key, or else at the end of the mapping.

    A mapping that is not in block style, or that an alias shares, is written again in block style.
    """
    mapping, values, remaining = YAML().compose(text), _plain(text), [*keys]
    step = next((_column(value) for key, value in mapping.value if _is_block(key, value)), 2)
    while remaining and (pair := _find(mapping, remaining[0])) is not None and _is_block(*pair):
        mapping, values = pair[1], values[remaining.pop(0)]
    if remaining:
        first, *deeper = remaining
        comment = "" if (pair := _find(mapping, first)) is None else _comment(text, *pair)
        lines = {first: f"{first}:{comment}\n{_block(deeper, values.get(first), lines, ' ' * step)}"}
    indent = " " * _column(mapping)
    texts = {name: textwrap.indent(f"{line}\n", indent) for name, line in lines.items()}
    rows, end = text.splitlines(keepends=True), _after(*mapping.value[-1])
    while end < len(rows) and re.match(f"{indent} *#", rows[end]):  # comments of the mapping
        end += 1
    rows[end:end] = [text for name, text in texts.items() if _find(mapping, name) is None]
    for key, value in reversed(mapping.value):
        if key.value in texts:
            rows[key.start_mark.line : _after(key, value)] = [texts[key.value]]
    return "".join(rows)


def _find(mapping: MappingNode, name: str) -> Pair | None:
    return next((pair for pair in mapping.value if pair[0].value == name), None)


def _column(mapping: MappingNode) -> int:
    return int(mapping.value[0][0].start_mark.column)


def _is_block(key: Node, value: Node) -> bool:
    return isinstance(value, MappingNode) and not value.flow_style and not _is_elsewhere(key, value)


def _is_elsewhere(key: Node, value: Node) -> bool:
    """Return whether the value is not written after its key: an alias, or nothing."""
    return value.start_mark.index < key.end_mark.index or (
        isinstance(value, ScalarNode) and not value.value and not value.style
    )


def _after(key: Node, value: Node) -> int:
    """Return the number of the line after a value."""
    if _is_elsewhere(key, value):
        return int(key.end_mark.line) + 1
    if isinstance(value, MappingNode) and not value.flow_style:
        return _after(*value.value[-1])
    if isinstance(value, SequenceNode) and not value.flow_style:
        return _after(key, value.value[-1])
    return int(value.end_mark.line) + bool(value.end_mark.column)  # a block scalar ends before a line


def _comment(text: str, key: Node, value: Node) -> str:
    """Return the comment after a value, with the spaces before it."""
    end = key if _is_elsewhere(key, value) else value
    rest = text[end.end_mark.index :].partition("\n")[0]
    comment = re.search(r"\s+#.*", rest)
    return comment[0] if comment is not None else ""


def _block(keys: Sequence[str], old: Any, lines: Mapping[str, str], indent: str) -> str:
    """Return the old values in block style, with `lines` in the mapping below `keys`."""
    old_values = old if isinstance(old, dict) else {}
    if keys:
        first, *deeper = keys
        lines = {first: f"{first}:\n{_block(deeper, old_values.get(first), lines, indent)}"}
    texts = {**{name: _lines(name, value) for name, value in old_values.items()}, **lines}
    return textwrap.indent("\n".join(texts.values()), indent)


def _lines(name: str, value: Any) -> str:
    out = io.StringIO()
    YAML().dump({name: value}, out)
    return out.getvalue().rstrip("\n")


def difference(before: str, after: str, name: str) -> str:
    """Return the difference as a patch."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, name, name))


def own_file(file: Path, shipped: Path) -> Path:
    """Return the file to write for a profile. For a shipped one, it is a user's file that overrides it."""
    if file.resolve().parent != shipped.resolve():
        return file
    return Path(platformdirs.user_config_dir("launcher")) / "clusters" / file.name
