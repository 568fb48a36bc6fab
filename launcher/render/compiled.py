"""Compiled templates, kept between processes."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import jinja2

_DECIDES = ("environment.py", "quote.py")
"Files of this package that decide, beside a template's source, what it is compiled to."


class CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Jinja's cache of bytecode. It reads a file only for the same source, Python, Jinja and launcher.

    A folder that cannot be written, or a file in it that cannot be read, costs time, not the rendering.
    """

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        try:
            super().load_bytecode(bucket)
        except Exception:  # pickle reads it, and a damaged file may raise anything
            bucket.reset()

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):
            super().dump_bytecode(bucket)


def compiled_templates(kind: str) -> CompiledTemplates | None:
    """Return the cache for one language of output: constants in a template are quoted when it is compiled.

    None if the folder is not the user's alone to write: its files are code that would be run.
    """
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("launcher")) / "templates"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):
        return None
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return CompiledTemplates(str(folder), f"{kind}-{_version()}-%s")


def _version() -> str:
    digest = hashlib.sha256(jinja2.__version__.encode())
    for name in _DECIDES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]
