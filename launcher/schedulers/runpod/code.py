"""The job's code as one archive: the same bytes for the same content."""

from __future__ import annotations

import gzip
import io
import tarfile

from launcher.schedulers.over_ssh.snapshot import Snapshot


def pack(snapshot: Snapshot) -> bytes:
    """tar.gz. Raises OSError."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in snapshot.entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
                continue
            data = (snapshot.root / entry.path).read_bytes()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()
