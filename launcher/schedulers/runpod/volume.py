"""Read and write a network volume without a pod, through its S3 API."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.schedulers.base import MaybeDoneError, SchedulerError
from launcher.schedulers.runpod.errors import clean
from launcher.schedulers.runpod.settings import s3_keys
from launcher.spec import variables

PART = 8 * 2**20
"Maximum bytes read per request."
MOST_PAGES = 1000
"Maximum pages of one listing, with a thousand files each."


@dataclass(frozen=True)
class Object:
    """A file on the volume. `size` is in bytes."""

    key: str
    size: int
    mark: str
    "ETag and modification time; it changes whenever the file is written."


class VolumeError(SchedulerError):
    """A request to the volume failed."""


class NoAnswerError(VolumeError, MaybeDoneError):
    """The request was sent, but no answer came."""


class GoneError(VolumeError):
    """The object does not exist."""


def endpoint(centre: str | None) -> str:
    """Return the URL of a data centre's S3 API. Raises VolumeError."""
    named = named_endpoint()
    if named is None and centre is None:
        raise VolumeError("the data centre of the volume is unknown: name it in runpod.data_centers")
    if named is not None:
        from launcher.schedulers.runpod.api import secure

        return secure(named, variables.RUNPOD_S3)
    return f"https://s3api-{str(centre).lower()}.runpod.io/"


def named_endpoint() -> str | None:
    """Return the URL that the user set in the environment, or None."""
    return os.environ.get(variables.RUNPOD_S3)


class Volume:
    """A network volume. Keys are paths below the mount point. Every method raises VolumeError."""

    def __init__(self, volume_id: str, centre: str | None) -> None:
        self.id = volume_id
        self._client = _client(endpoint(centre), centre)

    def walk(self, prefix: str) -> tuple[list[Object], list[str]]:
        """Return the files of one folder and the names of its folders. `prefix` ends with a slash."""
        files, folders = [], []
        for page in self._pages(prefix, Delimiter="/"):
            files += [_object(item) for item in page.get("Contents", ()) if item["Key"] != prefix]
            folders += [
                item["Prefix"].removeprefix(prefix).rstrip("/") for item in page.get("CommonPrefixes", ())
            ]
        return files, folders

    def all(self, prefix: str) -> Iterator[Object]:
        for page in self._pages(prefix):
            yield from (_object(item) for item in page.get("Contents", ()))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from `start` up to, but not including, `end`; at most PART bytes."""
        end = start + PART if end is None else min(end, start + PART)
        if end <= start:
            return b""
        answer = self._do("get_object", Key=key, Range=f"bytes={start}-{end - 1}")
        data: bytes = answer["Body"].read(end - start + 1)
        if len(data) > end - start:
            raise VolumeError(f"volume {self.id}: {clean(key)}: the answer is longer than requested")
        return data

    def look(self, key: str) -> Object:
        answer = self._do("head_object", Key=key)
        return _object({**answer, "Key": key, "Size": answer["ContentLength"]})

    def write(self, key: str, data: bytes) -> None:
        self._do("put_object", Key=key, Body=data)

    def delete(self, key: str) -> None:
        self._do("delete_object", Key=key)

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        for _ in range(MOST_PAGES):
            page = self._do("list_objects_v2", Prefix=prefix, **more, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}
        raise VolumeError(f"volume {self.id}: the listing of {clean(prefix)} does not end")

    def _do(self, what: str, **fields: Any) -> dict[str, Any]:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionClosedError,
            ReadTimeoutError,
            ResponseStreamingError,
        )

        where = f"volume {self.id}: {what}" + (f" {clean(fields['Key'])}" if "Key" in fields else "")
        try:
            answer: dict[str, Any] = getattr(self._client, what)(Bucket=self.id, **fields)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            details = error.response.get("Error", {})
            if status == 404 and details.get("Code") != "NoSuchBucket":
                raise GoneError(f"{where}: there is no such object") from None
            if status == 416:  # `start` is at or beyond the end
                return {"Body": io.BytesIO()}
            message = clean(details.get("Message") or details.get("Code") or status)
            raise VolumeError(f"{where}: {message}") from None
        except (ConnectionClosedError, ReadTimeoutError, ResponseStreamingError) as error:
            raise NoAnswerError(f"{where}: {clean(error)}") from None
        except (BotoCoreError, OSError, ValueError, KeyError) as error:
            raise VolumeError(f"{where}: {clean(error)}") from None
        return answer


def _object(answer: dict[str, Any]) -> Object:
    return Object(
        answer["Key"], int(answer["Size"]), f"{answer.get('ETag', '')} {answer.get('LastModified', '')}"
    )


def _client(url: str, centre: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise VolumeError(NO_EXTRA) from None
    access, secret = s3_keys()
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "max_attempts": 5},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(
        aws_access_key_id=access, aws_secret_access_key=secret, region_name=centre or "us-east-1"
    )
    try:
        return session.client("s3", endpoint_url=url, config=config)
    except ValueError as error:
        raise VolumeError(f"{variables.RUNPOD_S3}: {clean(error)}") from None


NO_EXTRA = (
    "RunPod needs packages that are not installed: install launcher's checkout with the extra `runpod`: "
    "run pip install '.[runpod]' in it"
)
