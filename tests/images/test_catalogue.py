"""The catalogue: every mistake with its line, and what of it is refused before anything is built."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from launcher.images import ImageError
from launcher.images.build import base_of, write_context
from launcher.images.catalogue import catalogue_folder, find_image, load_catalogue, pins
from launcher.images.context import BuildOptions, build_files
from launcher.images.publish import by_digest, push, record
from launcher.render.quote import RenderError
from launcher.render.shipped import containers_dir
from launcher.spec.errors import SpecError
from tests.images.examples import DIGEST, images, rendered

TEXT = (containers_dir() / "images.yaml").read_text()
CPU = images()[0]
SNAPSHOT = next(image.debian_snapshot for image in images() if image.debian_snapshot is not None)


def written(folder: Path, text: str = TEXT) -> Path:
    """A project's own catalogue, with the shipped lock files."""
    own = folder / "containers"
    (own / "locks").mkdir(parents=True)
    (own / "images.yaml").write_text(text)
    for lock in (containers_dir() / "locks").glob("*.txt"):
        (own / "locks" / lock.name).write_text(lock.read_text())
    return own


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"digest: {CPU.base.digest}", "digest: sha256:12", "images.0.base.digest: "),
        ("target: docker", "target: dockr", "'dockr' is not known; did you mean 'docker'?"),
        ("without: [bitsandbytes]", "withou: [bitsandbytes]", "unknown field; did you mean 'without'?"),
        ("extras: [train]", "extras: [trian]", "launcher has no extra 'trian'; it has "),
        (
            f"debian_snapshot: {SNAPSHOT}",
            "debian_snapshot: 20261332T000000Z",
            "20261332T000000Z is not a time",
        ),
        ("lock: locks/cpu.txt", "lock: locks/cpus.txt", "there is no locks/cpus.txt"),
        ("torch: 2.13.0+cpu", "torch: 2.12.0+cpu", "2.12.0+cpu, but locks/cpu.txt has 2.13.0+cpu"),
        ("description: slim", "description: [slim]\n    x: slim", "must be text"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = TEXT.replace(old, new, 1)
    with pytest.raises(SpecError) as caught:
        load_catalogue(written(tmp_path, text))
    assert f"images.yaml:{line_of(text, new.splitlines()[0])}: " in str(caught.value)
    assert message in str(caught.value)


def test_rules_between_fields_are_told_too(tmp_path: Path) -> None:
    for old, new, message in (
        ("openssh-server, curl", "curl", "debian_packages must have openssh-server"),
        ("name: cuda13", "name: cpu", "there are several named cpu"),
        (
            "debian_snapshot: 20261115T000000Z\n    profiles: [slurm-a",
            "profiles: [slurm-a",
            "need debian_snapshot",
        ),
    ):
        text = TEXT.replace(old, new)
        assert text != TEXT
        with pytest.raises(SpecError, match=message):
            load_catalogue(written(tmp_path / new[:12].replace("/", ""), text))


def test_a_projects_own_catalogue_wins(tmp_path: Path) -> None:
    assert catalogue_folder(tmp_path) == containers_dir()
    assert catalogue_folder(written(tmp_path).parent) == tmp_path / "containers"


def test_the_example_for_an_older_driver_is_an_image_that_builds_from_its_lock(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    (example,) = re.findall(r"```yaml\n( +- name: cuda126\n.*?)```", page, flags=re.S)
    own = written(tmp_path, f"{TEXT}\n{textwrap.indent(textwrap.dedent(example), '  ')}")
    (own / "locks/cuda126.txt").write_text(f"torch==2.13.0+cu126 --hash=sha256:{'0' * 64}\n")
    image = load_catalogue(own)[-1]
    recipe, *_ = build_files(image, own / image.lock, BuildOptions(base_of(image, None, unpinned=False)))
    assert "launcher.torch=2.13.0+cu126 " in recipe.text and "launcher.cuda=12.6 " in recipe.text


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'cuda13'"):
        find_image("cuda12", images())


def test_every_line_of_a_lock_has_a_hash_and_torch_is_the_catalogues() -> None:
    for image in images():
        lock = containers_dir() / image.lock
        lines = [
            line for line in lock.read_text().splitlines() if not line.startswith(("#", "--extra-index-url "))
        ]
        assert all(line.partition(" --hash=sha256:")[2].isalnum() for line in lines)
        assert len(pins(lock)) == len(lines) and pins(lock)["torch"] == image.torch


def test_every_image_is_built_on_a_digest_without_being_told_one() -> None:
    for image in images():
        assert base_of(image, None, unpinned=False) == f"docker.io/library/python@{image.base.digest}"


def test_a_base_without_a_digest_is_refused_unless_told_that_it_may_be() -> None:
    unpinned = CPU.model_copy(update={"base": CPU.base.model_copy(update={"digest": None})})
    with pytest.raises(ImageError, match=r"no digest: .*--unpinned-base.*\n.*imagetools inspect"):
        base_of(unpinned, None, unpinned=False)
    with pytest.raises(ImageError, match="no digest: my/base:1 may be another"):
        base_of(CPU, "my/base:1", unpinned=False)
    assert base_of(unpinned, None, unpinned=True) == CPU.base.image
    assert base_of(CPU, f"my/base@{DIGEST}", unpinned=False) == f"my/base@{DIGEST}"


def test_a_base_that_could_be_read_as_more_than_a_name_is_refused() -> None:
    for base in ("a\nRUN id", "$(id)", "--platform=x", 'a" AS b'):
        with pytest.raises(RenderError, match="is not an image reference"):
            build_files(CPU, containers_dir() / CPU.lock, BuildOptions(base))


def test_only_what_the_build_names_gets_into_its_context(tmp_path: Path) -> None:
    write_context(tmp_path, list(rendered(CPU).values()))
    kept = [path.partition("/")[2] for path in rendered(CPU)]
    assert (tmp_path / "start.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / ".dockerignore").read_text().splitlines()[0] == "*"
    assert sorted(kept) == [".dockerignore", "Dockerfile", "start.sh"]


def test_a_name_of_the_catalogue_becomes_the_digest_that_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert by_digest("pytorch/pytorch", "runpod", tmp_path) == "pytorch/pytorch"
    with pytest.raises(ImageError, match="is not published"):
        by_digest("catalog:cpu", "docker", tmp_path)
    with pytest.raises(SpecError, match="did you mean 'cpu'"):
        by_digest("catalog:cpuu", "docker", tmp_path)
    file = record("cpu", f"ghcr.io/me/launcher/cpu@{DIGEST}", tmp_path)
    assert file == tmp_path / "config/launcher/containers/published.yaml"
    assert by_digest("catalog:cpu", "runpod", tmp_path) == f"ghcr.io/me/launcher/cpu@{DIGEST}"
    assert by_digest("catalog:cpu", "pyxis", tmp_path) == f"ghcr.io#me/launcher/cpu@{DIGEST}"
    written(tmp_path)
    assert record("cpu", f"other.io/cpu@{DIGEST}", tmp_path) == tmp_path / "containers/published.yaml"
    assert by_digest("catalog:cpu", "runpod", tmp_path) == f"other.io/cpu@{DIGEST}"


def test_a_destination_that_no_registry_takes_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    from launcher.images.builders import BUILDERS

    for to in ("https://ghcr.io/me", "ghcr.io/Me", "-x/y", "ghcr.io/me; id"):
        with pytest.raises(ImageError, match="write REGISTRY/PATH"):
            push(BUILDERS["buildah"], CPU, "x", to, "1", tmp_path)
