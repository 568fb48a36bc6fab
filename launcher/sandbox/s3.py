"""The S3 endpoint of the network volumes: a bucket is a volume, and a key is a path below its folder.

It supports the part of S3 that file transfer needs: single requests, multipart uploads and path-style
addresses. It checks the access key but not the signature, because all its users are on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from launcher.rundir.time import stamp
from launcher.sandbox.cloud import Cloud

CHUNK = 1 << 20
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class S3Error(Exception):
    """A request that is answered with an S3 error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class S3:
    """The S3 routes."""

    def __init__(self, cloud: Cloud, access_key: str) -> None:
        self.cloud = cloud
        self.access_key = access_key
        self.parts = cloud.folder / "uploads"
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir()

    def routes(self) -> list[Route]:
        # Two routes for a bucket: some clients append a slash and some do not.
        return [
            Route("/s3/{bucket}", self.bucket, methods=["GET", "HEAD", "POST"]),
            Route("/s3/{bucket}/", self.bucket, methods=["GET", "HEAD", "POST"]),
            Route("/s3/{bucket}/{key:path}", self.object, methods=["GET", "HEAD", "PUT", "POST", "DELETE"]),
            Route("/s3/{rest:path}", self.nothing, methods=["GET", "HEAD", "PUT", "POST", "DELETE"]),
        ]

    async def bucket(self, request: Request) -> Response:
        try:
            volume = self._volume(request)
            if request.method == "HEAD":
                return Response()
            if request.method == "POST" and "delete" in request.query_params:
                return self._delete_many(volume, await request.body())
            if request.method == "GET" and "location" in request.query_params:
                return _xml("LocationConstraint", [])
            if request.method == "GET":
                return self._list(volume, dict(request.query_params), request.path_params["bucket"])
            raise S3Error(501, "NotImplemented", f"{request.method} of a bucket")
        except S3Error as error:
            return await _refusal(request, error)

    async def nothing(self, request: Request) -> Response:
        return await _refusal(request, S3Error(404, "NoSuchKey", "no bucket, or no key"))

    async def object(self, request: Request) -> Response:
        try:
            volume = self._volume(request)
            path = _path(volume, request.path_params["key"])
            query = request.query_params
            if request.method in ("GET", "HEAD"):
                return _get(path, request)
            if request.method == "DELETE" and "uploadId" in query:
                shutil.rmtree(self._upload(query["uploadId"]))
                return Response(status_code=204)
            if request.method == "DELETE":
                _delete(volume, path)
                return Response(status_code=204)
            if request.method == "POST" and "uploads" in query:
                upload = secrets.token_hex(16)
                (self.parts / upload).mkdir()
                key = request.path_params["key"]
                named = [("Bucket", request.path_params["bucket"]), ("Key", key), ("UploadId", upload)]
                return _xml("InitiateMultipartUploadResult", named)
            if request.method == "POST" and "uploadId" in query:
                return self._complete(path, query["uploadId"], await request.body(), request.path_params)
            if "uploadId" in query:
                part = self._upload(query["uploadId"]) / str(int(query["partNumber"]))
                return await self._put(part, request)
            return await self._put(path, request)
        except S3Error as error:
            return await _refusal(request, error)

    def _volume(self, request: Request) -> Path:
        match = re.search(r"Credential=([^/,]+)/", request.headers.get("authorization", ""))
        if match is None:
            raise S3Error(403, "AccessDenied", "the request is not signed")
        if match[1] != self.access_key:
            raise S3Error(403, "InvalidAccessKeyId", "the access key is not known")
        target = f"{request.method} {request.url.path}"
        if (status := self.cloud.dice.happens("s3-error", target)) is not None:
            raise S3Error(int(status), "SlowDown", "injected: please try again")
        bucket = request.path_params["bucket"]
        if bucket not in self.cloud.volumes:
            raise S3Error(404, "NoSuchBucket", f"no network volume {bucket}")
        return self.cloud.volume_folder(bucket)

    # Listing

    def _list(self, volume: Path, query: dict[str, str], bucket: str) -> Response:
        if query.get("list-type") != "2":
            raise S3Error(501, "NotImplemented", "only ListObjectsV2")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        max_keys = min(int(query.get("max-keys", "1000")), 1000)

        def encoded(key: str) -> str:
            return quote(key) if query.get("encoding-type") == "url" else key

        entries: list[tuple[str, Any]] = []
        last = ""
        truncated = False
        for key, path in _keys(volume, prefix):
            name = key
            if delimiter and (cut := key.find(delimiter, len(prefix))) >= 0:
                name = key[: cut + len(delimiter)]
            # A folder that is already in the answer covers all of its keys.
            if name <= after or name == last:
                continue
            if len(entries) == max_keys:
                truncated = True
                break
            last = name
            if name != key:
                entries.append(("CommonPrefixes", [("Prefix", encoded(name))]))
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            fields = [
                ("Key", encoded(key)), ("LastModified", stamp(stat.st_mtime)), ("ETag", _etag(stat)),
                ("Size", str(stat.st_size)), ("StorageClass", "STANDARD"),
            ]  # fmt: skip
            entries.append(("Contents", fields))
        head: list[tuple[str, Any]] = [
            ("Name", bucket), ("Prefix", encoded(prefix)), ("MaxKeys", str(max_keys)),
            ("KeyCount", str(len(entries))),
            ("IsTruncated", "true" if truncated else "false"),
        ]  # fmt: skip
        if delimiter:
            head.append(("Delimiter", encoded(delimiter)))
        if "encoding-type" in query:
            head.append(("EncodingType", query["encoding-type"]))
        if truncated:
            head.append(("NextContinuationToken", last))
        return _xml("ListBucketResult", [*head, *entries])

    def _delete_many(self, volume: Path, body: bytes) -> Response:
        keys = [element.text or "" for element in _read(body).iter(f"{{{_NAMESPACE}}}Key")]
        for key in keys:
            _delete(volume, _path(volume, key))
        return _xml("DeleteResult", [("Deleted", [("Key", key)]) for key in keys])

    # Writing

    async def _put(self, path: Path, request: Request) -> Response:
        """Write a file. It appears whole or not at all."""
        if request.path_params["key"].endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            return Response()
        if "aws-chunked" in request.headers.get("content-encoding", ""):
            raise S3Error(501, "NotImplemented", "uploads in signed chunks")
        new = self.parts / secrets.token_hex(8)
        try:
            with open(new, "wb") as file:
                async for chunk in request.stream():
                    file.write(chunk)
            path.parent.mkdir(parents=True, exist_ok=True)
            new.replace(path)
        except (NotADirectoryError, FileExistsError, IsADirectoryError):
            raise S3Error(409, "InvalidRequest", "a part of the key is a file, or the key a folder") from None
        finally:
            new.unlink(missing_ok=True)
        return Response(headers={"ETag": _etag(path.stat())})

    def _upload(self, id: str) -> Path:
        folder = self.parts / id
        if not re.fullmatch(r"[0-9a-f]{32}", id) or not folder.is_dir():
            raise S3Error(404, "NoSuchUpload", "the upload is not known")
        return folder

    def _complete(self, path: Path, id: str, body: bytes, names: dict[str, str]) -> Response:
        folder = self._upload(id)
        numbers = [int(element.text or 0) for element in _read(body).iter(f"{{{_NAMESPACE}}}PartNumber")]
        whole = folder / "whole"
        with open(whole, "wb") as file:
            for number in numbers:
                with open(folder / str(number), "rb") as part:
                    shutil.copyfileobj(part, file, CHUNK)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.replace(path)
        shutil.rmtree(folder)
        fields = [("Bucket", names["bucket"]), ("Key", names["key"]), ("ETag", _etag(path.stat()))]
        return _xml("CompleteMultipartUploadResult", fields)


def _path(volume: Path, key: str) -> Path:
    parts = key.rstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise S3Error(400, "InvalidArgument", f"key {key!r} is not a path below the volume")
    return volume.joinpath(*parts)


def _keys(volume: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """Yield (key, path) in S3's order, which compares whole keys."""
    start = volume / prefix.rpartition("/")[0]
    entries = []
    for folder, _, files in os.walk(start):
        for name in files:
            path = Path(folder) / name
            key = str(path.relative_to(volume))
            if key.startswith(prefix):
                entries.append((key, path))
    yield from sorted(entries)


def _get(path: Path, request: Request) -> Response:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise S3Error(404, "NoSuchKey", "the key does not exist") from None
    stat = os.fstat(file.fileno())
    first, last = 0, stat.st_size - 1
    headers = {
        "ETag": _etag(stat),
        "Last-Modified": formatdate(stat.st_mtime, usegmt=True),
        "Accept-Ranges": "bytes",
    }
    status = 200
    if range_ := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
        if range_[1]:
            first, last = int(range_[1]), min(int(range_[2] or last), last)
        else:
            first = max(0, stat.st_size - int(range_[2]))
        if first > last:
            file.close()
            raise S3Error(416, "InvalidRange", "the range is not satisfiable")
        status = 206
        headers["Content-Range"] = f"bytes {first}-{last}/{stat.st_size}"
    headers["Content-Length"] = str(last - first + 1)
    media_type = "application/octet-stream"
    if request.method == "HEAD":
        file.close()
        return Response(status_code=status, headers=headers, media_type=media_type)

    async def content() -> AsyncIterator[bytes]:
        with file:
            file.seek(first)
            remaining = last - first + 1
            # If the file shrinks meanwhile, the connection ends before Content-Length, as it should.
            while remaining > 0 and (chunk := file.read(min(CHUNK, remaining))):
                remaining -= len(chunk)
                yield chunk

    return StreamingResponse(content(), status, headers, media_type)


def _delete(volume: Path, path: Path) -> None:
    """Delete the file if it exists, and its parent folders that are then empty."""
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == volume or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()


def _etag(stat: os.stat_result) -> str:
    """Return an ETag of time and size, to avoid reading large files. Its suffix shows that it is no MD5."""
    text = f"{stat.st_mtime_ns} {stat.st_size} {stat.st_ino}"
    return f'"{hashlib.md5(text.encode()).hexdigest()}-1"'


def _read(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise S3Error(400, "MalformedXML", str(error)) from None


def _xml(name: str, fields: list[tuple[str, Any]], status: int = 200) -> Response:
    def fill(parent: ElementTree.Element, fields: list[tuple[str, Any]]) -> None:
        for tag, value in fields:
            element = ElementTree.SubElement(parent, tag)
            if isinstance(value, list):
                fill(element, value)
            else:
                element.text = value

    root = ElementTree.Element(name, {} if status >= 400 else {"xmlns": _NAMESPACE})
    fill(root, fields)
    return Response(ElementTree.tostring(root, "utf-8", xml_declaration=True), status, media_type="text/xml")


async def _refusal(request: Request, error: S3Error) -> Response:
    # boto3 sends a body only when the server reads it, and misreads the answers if the server never does.
    with contextlib.suppress(RuntimeError):  # the body was read before
        await request.body()
    return _xml("Error", [("Code", error.code), ("Message", str(error))], error.status)
