"""Keep comments after a YAML mapping in front of the next key when keys are added to the mapping.

ruamel.yaml attaches a comment to the value before it. The comment of the next key therefore belongs to the
last value of a mapping, and would end up in the middle of the mapping when another key follows that value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.tokens import CommentToken

VALUE, ITEM = 2, 0
"Positions where ruamel.yaml stores the comment after a key's value and after a list item."


@contextmanager
def trailing_comments_kept(profile: CommentedMap, *keys: str) -> Iterator[None]:
    """Keep the comments after the mapping below these keys while the block changes it.

    Comments after it that are indented like its keys belong to it and stay in place.
    """
    at, key, *deeper = profile, *keys
    if key not in at:
        yield
        return
    for one in deeper:
        if not (isinstance(at[key], CommentedMap) and one in at[key]):
            break
        at, key = at[key], one
    value = at[key]
    column = value.lc.col if _is_block(value) else at.lc.key(key)[1] + 1
    token = _token(*_last(at, key))
    first, lines = _split(token)
    kept = next((number for number, line in enumerate(lines) if _is_outside(line, column)), len(lines))
    while kept and not lines[kept - 1].strip():
        kept -= 1
    if token is not None:
        token.value = "".join([first, *lines[:kept]])
    yield
    if lines[kept:]:
        _append(*_last(at, key), "".join(lines[kept:]))


def replace_comment(mapping: CommentedMap, key: str, comment: str = "") -> None:
    """Replace the comment on the line of a key, and keep those on the lines below it."""
    _, lines = _split(_token(mapping, key))
    mapping.ca.items.pop(key, None)
    if comment:
        mapping.yaml_add_eol_comment(comment, key)
    if lines:
        _append(mapping, key, "".join(lines))


def _split(token: CommentToken | None) -> tuple[str, list[str]]:
    """Return a comment's part on the line of its value, and the lines below."""
    first, *lines = token.value.splitlines(keepends=True) if token is not None else [""]
    return first, lines


def _is_outside(line: str, column: int) -> bool:
    text = line.lstrip(" ")
    return text.startswith("#") and len(line) - len(text) < column


def _is_block(value: Any) -> bool:
    return isinstance(value, CommentedMap | CommentedSeq) and bool(value) and not value.fa.flow_style()


def _last(at: Any, key: Any) -> tuple[Any, Any]:
    """Return the mapping or list with the last value below a key, and that value's key or index."""
    while _is_block(value := at[key]) and value.anchor.value is None:
        at, key = value, len(value) - 1 if isinstance(value, CommentedSeq) else list(value)[-1]
    return at, key


def _token(at: Any, key: Any) -> CommentToken | None:
    """Return the comment after a value, with the lines below it."""
    tokens = at.ca.items.get(key)
    found = tokens[ITEM if isinstance(at, CommentedSeq) else VALUE] if tokens else None
    return found or getattr(at[key], "comment", None)  # a block scalar (`|`) has its own


def _append(at: Any, key: Any, lines: str) -> None:
    """Append comment lines after a value."""
    token = _token(at, key)
    if token is None:
        token = CommentToken("\n", CommentMark(0))
        at.ca.items.setdefault(key, [None] * 4)[ITEM if isinstance(at, CommentedSeq) else VALUE] = token
    token.value = f"{token.value.removesuffix(chr(10))}\n{lines}"
