"""A volume whose server lies: nothing is written outside the copy, nothing is read without an end."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3")

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.mirror import Copy
from launcher.schedulers.runpod.volume import Volume, VolumeError, endpoint
from launcher.schedulers.wanted_files import Wanted
from tests.schedulers.runpod.http_server import Asked, Reply, Served

SECRET = "rps_CANARY_55"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Volume]]:
    monkeypatch.setenv("RUNPOD_S3_ACCESS_KEY", "user_x")
    monkeypatch.setenv("RUNPOD_S3_SECRET_KEY", SECRET)
    running: list[Served] = []

    def start(answer: Callable[[Asked], Reply]) -> Volume:
        running.append(Served(answer))
        monkeypatch.setenv("LAUNCHER_RUNPOD_S3", running[-1].url)
        return Volume("vol", "EU-RO-1")

    yield start
    for server in running:
        server.close()


def listing(*keys: str, prefixes: tuple[str, ...] = (), more: bool = False) -> Reply:
    contents = "".join(
        f'<Contents><Key>{key}</Key><Size>4</Size><ETag>"e"</ETag>'
        "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        for key in keys
    )
    folders = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in prefixes)
    token = "<NextContinuationToken>t</NextContinuationToken>" if more else ""
    truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
    text = f"<ListBucketResult>{truncated}{contents}{folders}</ListBucketResult>"
    return Reply(raw=text.encode(), headers={"Content-Type": "application/xml"})


def test_names_that_lead_out_of_the_run_are_not_followed(
    serve: Callable[..., Volume], tmp_path: Path
) -> None:
    prefix = "runs/r/"

    def answer(asked: Asked) -> Reply:
        if asked.path in ("/vol", "/vol/") and "attempts" not in asked.query:
            names = (f"{prefix}../../evil.json", f"{prefix}/etc/evil.json", f"{prefix}metrics.jsonl")
            return listing(*names, prefixes=(f"{prefix}../", f"{prefix}checkpoints/"))
        if asked.path.endswith("state.json"):
            return Reply(404)
        return Reply(206, raw=b"{}\n\n", headers={"ETag": '"e"'})

    run = RunDir(tmp_path / "copies" / "r")
    run.path.mkdir(parents=True)
    copy = Copy(run, serve(answer), prefix)
    copy.fetch(Wanted(logs=True))
    copy.download(tmp_path / "all")
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    expected = {
        "copies/r/metrics.jsonl",
        "copies/r/.volume.json",
        "copies/r/.volume.lock",
        "all/metrics.jsonl",
        "all/.marks.json",
    }
    assert written == expected


class Bucket:
    """Objects below runs/r/, which `before_read` may change."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.before_read: Callable[[str], None] = lambda _: None

    def __call__(self, asked: Asked) -> Reply:
        if asked.path in ("/vol", "/vol/"):
            found = "".join(
                f"<Contents><Key>runs/r/{name}</Key><Size>{len(data)}</Size><ETag>{self.etag(name)}</ETag></Contents>"
                for name, data in self.objects.items()
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
            return Reply(raw=text.encode(), headers={"Content-Type": "application/xml"})
        name = asked.path.removeprefix("/vol/runs/r/")
        if asked.method == "GET":
            self.before_read(name)
        if name not in self.objects:
            return Reply(404)
        data, headers = self.objects[name], {"ETag": self.etag(name)}
        if asked.method == "HEAD":
            return Reply(200, raw=data, headers=headers)
        start, end = map(int, asked.headers["Range"].removeprefix("bytes=").split("-"))
        return Reply(206, raw=data[start : end + 1], headers=headers) if start < len(data) else Reply(416)

    def etag(self, name: str) -> str:
        return f'"{hashlib.md5(self.objects[name]).hexdigest()}"'


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def copy(serve: Callable[..., Volume], bucket: Bucket, tmp_path: Path) -> Copy:
    return Copy(RunDir(tmp_path / "copies" / "r"), serve(bucket), "runs/r/")


def test_what_is_written_anew_in_the_same_size_is_downloaded_anew(
    copy: Copy, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.objects = {"checkpoints/": b"", "checkpoints/a/rank.bin": b"1234", "state.json": b'{"a": 1}'}
    assert copy.download(tmp_path / "all") == 12
    assert copy.download(tmp_path / "all") == 0
    bucket.objects["state.json"] = b'{"a": 2}'
    assert copy.download(tmp_path / "all") == 8
    assert (tmp_path / "all" / "state.json").read_bytes() == b'{"a": 2}'
    assert (tmp_path / "all" / "checkpoints" / "a" / "rank.bin").read_bytes() == b"1234"


def test_a_download_does_not_mix_the_checkpoints_of_two_runs(
    copy: Copy, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.objects = {"checkpoints/step-00000002/complete.json": b"{}"}
    copy.download(tmp_path / "all")
    other = Copy(RunDir(tmp_path / "copies" / "other"), copy.volume, copy.prefix)
    bucket.objects = {"checkpoints/step-00000001/complete.json": b"{}"}
    with pytest.raises(SchedulerError, match="has the run r: download other to another directory"):
        other.download(tmp_path / "all")
    assert [path.name for path in (tmp_path / "all" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_file_that_changes_while_it_is_read_comes_whole_or_not_at_all(
    copy: Copy, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.schedulers.runpod.volume.PART", 4)
    versions = [b"22222222", b"333", b"4444444444", b"55"]

    def change(name: str) -> None:
        if versions:
            bucket.objects[name] = versions.pop(0)

    bucket.before_read = change
    bucket.objects = {"state.json": b"11111111"}
    with pytest.raises(VolumeError, match=r"runs/r/state\.json changed during every attempt"):
        copy.download(tmp_path / "all")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    versions.append(b"666666")
    assert copy.download(tmp_path / "all") == 6
    assert (tmp_path / "all" / "state.json").read_bytes() == b"666666"


def test_a_log_may_grow_and_a_file_may_go_while_a_run_is_downloaded(
    copy: Copy, bucket: Bucket, tmp_path: Path
) -> None:
    def change(name: str) -> None:
        bucket.objects["metrics.jsonl"] += b"more\n"
        bucket.objects.pop(".state.json.new", None)

    bucket.before_read = change
    bucket.objects = {".state.json.new": b"{}", "metrics.jsonl": b"line\n"}
    copy.download(tmp_path / "all")
    assert (tmp_path / "all" / "metrics.jsonl").read_bytes().startswith(b"line\n")
    assert not (tmp_path / "all" / ".state.json.new").exists()


@pytest.mark.parametrize("sending", [False, True])
def test_a_kill_between_two_requests_leaves_no_event_twice(
    copy: Copy, bucket: Bucket, tmp_path: Path, sending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = b'{"event": "submitting"}\n', b'{"event": "running"}\n'
    killed = Copy(RunDir(tmp_path / "killed"), copy.volume, copy.prefix)

    def leave() -> None:
        shutil.copytree(copy.run.path, killed.run.path, dirs_exist_ok=True)

    def write(key: str, data: bytes) -> None:
        bucket.objects[key.removeprefix(copy.prefix)] = data
        leave()

    copy.run.path.mkdir(parents=True)
    copy.run.events.write_bytes(ours)
    if sending:
        for file in (copy.run.run, copy.run.plan, copy.run.state, copy.run.cancel):
            file.write_text("{}")
        monkeypatch.setattr(copy.volume, "write", write)
        copy.push()
    else:
        bucket.objects |= {"events.jsonl": theirs, "metrics.jsonl": b"{}\n"}
        bucket.before_read = lambda name: leave() if name == "metrics.jsonl" else None
        copy.fetch(Wanted())
        bucket.before_read = lambda _: None
    killed.fetch(Wanted())
    assert killed.run.events.read_bytes() == (ours if sending else ours + theirs)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(403, raw=b"<Error><Code>AccessDenied</Code><Message>no entry</Message></Error>"), "no entry"),
        (Reply(200, raw=b"<html>what"), "volume vol: list_objects_v2"),
        (listing("a", more=True), "does not end"),
    ],
)
def test_what_is_no_answer_is_one_error_without_a_key(
    serve: Callable[..., Volume], monkeypatch: pytest.MonkeyPatch, reply: Reply, words: str
) -> None:
    monkeypatch.setattr("launcher.schedulers.runpod.volume.MOST_PAGES", 5)
    volume = serve(lambda _: reply)
    with pytest.raises(VolumeError) as caught:
        list(volume.all("runs/"))
    assert words in str(caught.value) and "\x1b" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_the_keys_of_a_volume_are_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCHER_RUNPOD_S3", raising=False)
    assert endpoint("EU-RO-1") == "https://s3api-eu-ro-1.runpod.io/"
    monkeypatch.setenv("LAUNCHER_RUNPOD_S3", "http://somewhere.else/")
    with pytest.raises(Exception, match="only over https"):
        endpoint("EU-RO-1")
