"""The S3 endpoint with the client that everybody uses; the bucket is the folder that pods see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.lab import wait_for
from tests.sandbox.server import VOLUME, Sandbox, start


def client(sandbox: Sandbox, access: str | None = None) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=sandbox.environ["LAUNCHER_RUNPOD_S3"],
        region_name="EU-RO-1",
        aws_access_key_id=access or sandbox.environ["RUNPOD_S3_ACCESS_KEY"],
        aws_secret_access_key=sandbox.environ["RUNPOD_S3_SECRET_KEY"],
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with start(tmp_path_factory.mktemp("runpod") / "sandbox") as sandbox:
        yield sandbox


def refused(call: Any, **arguments: Any) -> tuple[str, int]:
    with pytest.raises(ClientError) as caught:
        call(Bucket=VOLUME, **arguments)
    answer = caught.value.response
    return answer["Error"]["Code"], answer["ResponseMetadata"]["HTTPStatusCode"]


def test_what_is_put_is_the_file_that_a_pod_sees_and_the_other_way_round(sandbox: Sandbox) -> None:
    s3 = client(sandbox)
    name = "runs/r 1/ümlaut+%&?#.txt"
    s3.put_object(Bucket=VOLUME, Key=name, Body=b"abc\n")
    assert (sandbox.volume / name).read_bytes() == b"abc\n"
    pod = sandbox.create("bash -c 'cat /workspace/runs/*/*.txt | tr a-c A-C >/workspace/answer; sleep 1000'")
    wait_for(lambda: (sandbox.volume / "answer").read_text() == "ABC\n", "the pod's answer")
    assert s3.get_object(Bucket=VOLUME, Key="answer")["Body"].read() == b"ABC\n"
    sandbox.ask("DELETE", f"/pods/{pod['id']}")
    assert s3.head_object(Bucket=VOLUME, Key=name)["ContentLength"] == 4
    s3.delete_object(Bucket=VOLUME, Key=name)
    assert not (sandbox.volume / "runs").exists(), "S3 knows no empty folders"
    s3.delete_object(Bucket=VOLUME, Key=name)
    assert refused(s3.get_object, Key=name) == ("NoSuchKey", 404)
    assert refused(s3.head_object, Key=name)[1] == 404


def test_a_growing_file_is_read_on_by_range(sandbox: Sandbox) -> None:
    s3 = client(sandbox)
    file = sandbox.volume / "grows"
    file.write_bytes(b"0123456789")
    first = s3.get_object(Bucket=VOLUME, Key="grows")
    assert first["Body"].read() == b"0123456789"
    with open(file, "ab") as more:
        more.write(b"abc")
    rest = s3.get_object(Bucket=VOLUME, Key="grows", Range="bytes=10-")
    assert rest["Body"].read() == b"abc" and rest["ContentRange"] == "bytes 10-12/13"
    assert rest["ETag"] != first["ETag"]
    assert s3.get_object(Bucket=VOLUME, Key="grows", Range="bytes=2-4")["Body"].read() == b"234"
    assert s3.get_object(Bucket=VOLUME, Key="grows", Range="bytes=-2")["Body"].read() == b"bc"
    assert refused(s3.get_object, Key="grows", Range="bytes=13-") == ("InvalidRange", 416)


def test_listing_goes_by_pages_and_by_folders(sandbox: Sandbox) -> None:
    s3 = client(sandbox)
    names = sorted(["l/a/1", "l/a/2", "l/a.b", "l/a b", "l/b/c/d", "l/z", "l/é"])
    for name in names:
        s3.put_object(Bucket=VOLUME, Key=name, Body=name.encode())
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=VOLUME, Prefix="l/", PaginationConfig={"PageSize": 2}
    )
    assert [entry["Key"] for page in pages for entry in page.get("Contents", [])] == names
    folders: list[str] = []
    plain: list[str] = []
    for page in s3.get_paginator("list_objects_v2").paginate(
        Bucket=VOLUME, Prefix="l/", Delimiter="/", PaginationConfig={"PageSize": 1}
    ):
        folders += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        plain += [entry["Key"] for entry in page.get("Contents", [])]
    assert folders == ["l/a/", "l/b/"] and plain == ["l/a b", "l/a.b", "l/z", "l/é"]
    assert [e["Size"] for e in s3.list_objects_v2(Bucket=VOLUME, Prefix="l/é")["Contents"]] == [4]
    assert s3.list_objects_v2(Bucket=VOLUME, Prefix="no/such")["KeyCount"] == 0
    gone = s3.delete_objects(Bucket=VOLUME, Delete={"Objects": [{"Key": name} for name in names]})
    assert len(gone["Deleted"]) == len(names) and not (sandbox.volume / "l").exists()


def test_a_large_file_arrives_in_parts_and_whole(sandbox: Sandbox, tmp_path: Path) -> None:
    s3 = client(sandbox)
    whole = os.urandom(1 << 20) * 20
    (tmp_path / "large").write_bytes(whole)
    s3.upload_file(str(tmp_path / "large"), VOLUME, "code/large.tar.gz")
    assert (sandbox.volume / "code/large.tar.gz").read_bytes() == whole
    s3.download_file(VOLUME, "code/large.tar.gz", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == whole
    upload = s3.create_multipart_upload(Bucket=VOLUME, Key="never")["UploadId"]
    s3.upload_part(Bucket=VOLUME, Key="never", UploadId=upload, PartNumber=1, Body=b"x")
    s3.abort_multipart_upload(Bucket=VOLUME, Key="never", UploadId=upload)
    assert not list((sandbox.folder / "uploads").iterdir()) and not (sandbox.volume / "never").exists()


def test_no_key_leads_out_of_the_volume_and_no_stranger_in(sandbox: Sandbox) -> None:
    s3 = client(sandbox)
    for key in ("../keys.json", "a/../../keys.json", "a//b", "./a", ".."):
        assert refused(s3.get_object, Key=key)[1] in (400, 404)
        assert refused(s3.put_object, Key=key, Body=b"x")[1] in (400, 404)
    assert b"api" in (sandbox.folder / "keys.json").read_bytes()
    assert refused(client(sandbox, access="user_x").list_objects_v2) == ("InvalidAccessKeyId", 403)
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3.list_objects_v2(Bucket="another")
    (sandbox.volume / "file").write_bytes(b"x")
    assert refused(s3.put_object, Key="file/below", Body=b"x") == ("InvalidRequest", 409)
    sandbox.faults(s3_error={"p": 1, "times": 1})
    assert refused(s3.get_object, Key="file") == ("SlowDown", 503)
    assert s3.get_object(Bucket=VOLUME, Key="file")["Body"].read() == b"x"
    sandbox.faults()
