"""Replace secret values by `***` in a stream of bytes, even if they span two chunks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.spec import variables

MASK = b"***"
POD_KEY = "RUNPOD_API_KEY"
"The key of a pod or of a user's account. No job needs it in its logs, whoever set it."
_SHORTEST_LINE = 8  # a shorter line of a multi-line secret is too common a text to be masked by itself


def secrets_of(environ: Mapping[str, str]) -> list[bytes]:
    """The values of RunPod's key and of the variables that `variables.SECRETS` lists with commas, if set."""
    names = [*environ.get(variables.SECRETS, "").split(","), POD_KEY]
    return [environ[name].encode(errors="surrogateescape") for name in names if environ.get(name)]


def masked_text(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` without the values of the secrets that `environ` names.

    Mask before you truncate: half a secret is not recognised.
    """
    try:
        data = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair, which JSON could not hold either
        data = text.encode(errors="backslashreplace")
    return Masker(secrets_of(environ)).whole(data).decode(errors="replace")


def masked_strings(value: Any, environ: Mapping[str, str]) -> Any:
    """Return a JSON value with all its strings masked, except a `timestamp`, which torchrun parses."""
    if isinstance(value, str):
        return masked_text(value, environ)
    if isinstance(value, list):
        return [masked_strings(item, environ) for item in value]
    if isinstance(value, dict):
        return {
            name: item if name == "timestamp" else masked_strings(item, environ)
            for name, item in value.items()
        }
    return value


class Masker:
    """Masks a stream chunk by chunk. Bytes that may begin a secret are held back until the next chunk."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = _variants(secrets)
        self._longest = max(map(len, self._secrets), default=0)
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        if not self._secrets:
            return chunk
        data = self._held + chunk
        cut = self._before_secrets(data, self._unfinished(data))
        if cut < len(data) - 4 * self._longest:
            # Mask a chain of overlapping secrets now instead of holding it forever, and hold the rest.
            data = self._replace(data)
            cut = self._unfinished(data)
        self._held = data[cut:]
        return self._replace(data[:cut])

    def flush(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        data, self._held = self._held, b""
        return self._replace(data)

    def whole(self, data: bytes) -> bytes:
        """Mask a text that is not part of the stream."""
        return self._replace(data)

    def _replace(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, MASK)
        return data

    def _unfinished(self, data: bytes) -> int:
        """Start of the longest end of `data` that a later chunk could complete to a secret."""
        cut = len(data)
        for secret in self._secrets:
            start = data.find(secret[:1], max(0, len(data) - len(secret) + 1))
            while start != -1:
                if secret.startswith(data[start:]):
                    cut = min(cut, start)
                    break
                start = data.find(secret[:1], start + 1)
        return cut

    def _before_secrets(self, data: bytes, cut: int) -> int:
        """`cut`, moved to the beginning of a secret that spans it."""
        moved = True
        while moved:
            moved = False
            for secret in self._secrets:
                start = data.find(secret, max(0, cut - len(secret) + 1), cut + len(secret) - 1)
                if start != -1 and start < cut:
                    cut, moved = start, True
        return cut


def _variants(secrets: Iterable[bytes]) -> list[bytes]:
    """Each value, the value without surrounding white space, its long lines, and the escaped forms of these;
    longest first."""
    values = set()
    for secret in secrets:
        values |= {secret, secret.strip()}
        lines = [line.strip() for line in secret.split(b"\n")]
        if len(lines) > 1:
            values |= {line for line in lines if len(line) >= _SHORTEST_LINE}
    for value in list(values):
        values |= _escaped(value)
    return sorted(
        (value for value in values if value.strip(b"* \t\r\n")), key=lambda value: (-len(value), value)
    )


_IN_DOUBLE_QUOTES = re.compile(r'["$`\\]')
_UNQUOTED = re.compile(r"[^\w@%+=:,./~-]", re.ASCII)


def _escaped(secret: bytes) -> set[bytes]:
    """The secret as repr(), ascii(), json.dumps(), repr() of bytes and shells show it, without quotes around
    it.

    Exceptions print secrets like this: KeyError shows its argument by repr, an HTTP client its headers as
    JSON. So do bash's `set -x`, `declare -p` and `printf %q`, and programs such as ls and cat when they name
    a file.
    """
    text = secret.decode(errors="surrogateescape")
    forms = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    forms |= {shlex.quote(text).strip("'"), text.replace("'", "'\\''")}
    forms |= {_IN_DOUBLE_QUOTES.sub(r"\\\g<0>", text), _UNQUOTED.sub(r"\\\g<0>", text)}
    forms |= {form.replace("~", "\\~", 1) for form in forms if form.startswith("~")}
    for parts in (
        [repr(part)[1:-1] for part in text.split("'")],
        [ascii(part)[1:-1] for part in text.split("'")],
        [repr(part)[2:-1] for part in secret.split(b"'")],
    ):
        # Python escapes a single quote only if there is a double one, which may be outside the secret.
        forms |= {"'".join(parts), "\\'".join(parts)}
    return {form.encode(errors="surrogateescape") for form in forms}
