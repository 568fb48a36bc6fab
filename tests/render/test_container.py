"""A Slurm step inside pyxis or Apptainer: what srun and apptainer are called with, and whose variables win.

The stub of apptainer really runs its command; neither enroot nor Apptainer itself is here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.render.quote import RenderError
from launcher.spec.cluster import Cluster
from tests.render import stubs
from tests.render.test_arrives import slurm_reads
from tests.render.test_sbatch import CLUSTER, finish, start, write


def run(
    folder: Path, runtime: str, image: str | None, env: dict[str, str] | None = None, **fields: object
) -> stubs.Stubs:
    stub = stubs.make(folder / "stubs")
    update = {"container": {"runtime": runtime, "image": image, "mounts": {"/usr": "/data"}}}
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "a").mkdir(exist_ok=True)
    for file in ("my.sqsh", "my.sif", "images/my.sqsh"):  # each node is looked at for what it needs
        (folder / file).touch()
    cluster = Cluster.model_validate({**CLUSTER.model_dump(), "setup": ["export FROM_SETUP=1"], **update})
    script = write(folder, stub, cluster, **fields)
    (script.parent / "check-node.sh").write_text("echo n1 ok\n")  # neither image nor mounts are here
    assert not any("container" in option for option in slurm_reads(script.read_text()))
    code, errors = finish(start(script, stub, **(env or {})))
    assert code == 0, errors
    return stub


def srun(stub: stubs.Stubs) -> list[str]:
    return [item.decode() for item in stub.called("srun")]


def apptainer(stub: stubs.Stubs) -> list[str]:
    return [item.decode() for item in stub.called("apptainer")]


def test_pyxis_options_stand_on_srun_only_with_the_run_directory_mounted(tmp_path: Path) -> None:
    called = srun(run(tmp_path, "pyxis", "images/my.sqsh", secrets=["HF_TOKEN"], env={"HF_TOKEN": "x"}))
    assert f"--container-image={tmp_path}/images/my.sqsh" in called
    assert f"--container-mounts=/usr:/data,{tmp_path}/run:{tmp_path}/run,{tmp_path}:{tmp_path}" in called
    assert "--container-env=HF_TOKEN,LAUNCHER_SETUP_DONE,PYTHONNOUSERSITE" in called
    assert "--no-container-entrypoint" in called


def test_what_slurm_gave_wins_over_an_image_that_names_gpus(tmp_path: Path) -> None:
    with_hardware = CLUSTER.model_dump() | {
        "node": {"gpu": {"type": "A100 40GB", "count": 2, "memory": "39GiB"}},
        "container": {"runtime": "pyxis", "image": "pytorch"},
    }
    stub = stubs.make(tmp_path / "stubs")
    finish(start(write(tmp_path, stub, Cluster.model_validate(with_hardware)), stub))
    assert "--container-env=PYTHONNOUSERSITE,CUDA_VISIBLE_DEVICES" in srun(stub)


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:25.10-py3", "pytorch/pytorch", "a@sha256:0f"])
def test_an_image_of_a_registry_keeps_its_name(tmp_path: Path, image: str) -> None:
    assert f"--container-image={image}" in srun(run(tmp_path, "pyxis", image))


@pytest.mark.parametrize("image", ["my.sqsh", "./my.sqsh", "../{}/my.sqsh", "a/../my.sqsh"])
def test_a_squashfs_file_is_an_absolute_path(tmp_path: Path, image: str) -> None:
    called = srun(run(tmp_path, "pyxis", image.format(tmp_path.name)))
    assert f"--container-image={tmp_path}/my.sqsh" in called


def test_the_secret_files_of_a_job_are_there_inside(tmp_path: Path) -> None:
    secrets = [{"name": "A", "file": "/etc/hostname"}, {"name": "B", "file": "~/b"}]
    called = srun(run(tmp_path, "pyxis", "my.sqsh", secrets=secrets))
    assert any(option.endswith(",/etc/hostname:/etc/hostname") for option in called)
    assert "--container-mount-home" in called


HOME = ("'--container-mount-home'", "'--no-container-mount-home'", "'--no-home'")


@pytest.mark.parametrize(
    ("runtime", "home", "option"),
    [
        ("pyxis", True, "--container-mount-home"),
        ("pyxis", False, "--no-container-mount-home"),
        ("pyxis", None, None),
        ("apptainer", False, "--no-home"),
    ],
)
def test_the_home_directory_is_there_inside_by_choice(
    tmp_path: Path, runtime: str, home: bool | None, option: str | None
) -> None:
    container = {"runtime": runtime, "image": "my.sif", "mount_home": home}
    cluster = Cluster.model_validate({**CLUSTER.model_dump(), "container": container})
    script = write(tmp_path, stubs.make(tmp_path / "stubs"), cluster).read_text()
    found = [word for word in script.split() if word in HOME]
    assert found == ([f"'{option}'"] if option else [])
    if home is False:
        with pytest.raises(RenderError, match=r"mount_home is false, and a secret .* read from ~/b"):
            write(tmp_path, stubs.make(tmp_path / "2"), cluster, secrets=[{"name": "B", "file": "~/b"}])


def test_our_variables_win_over_those_of_an_apptainer_image(tmp_path: Path) -> None:
    image = "HF_TOKEN=image PYTHONNOUSERSITE= LAUNCHER_SETUP_DONE= OTHER=image"
    env = {"HF_TOKEN": "a b'$x", "STUB_IMAGE_ENV": image}
    stub = run(tmp_path, "apptainer", "my.sif", secrets=["HF_TOKEN"], env=env)
    seen = stub.python_env()
    assert seen[b"HF_TOKEN"] == b"a b'$x" and seen[b"OTHER"] == b"image"
    assert seen[b"PYTHONNOUSERSITE"] == seen[b"LAUNCHER_SETUP_DONE"] == b"1"
    assert not any(b"a b" in word for word in stub.called("apptainer")), "a secret on a command line"


def test_apptainer_starts_no_entrypoint_and_binds_what_the_run_needs(tmp_path: Path) -> None:
    called = apptainer(run(tmp_path, "apptainer", "my.sif"))
    binds = f"/usr:/data,{tmp_path}/run:{tmp_path}/run,{tmp_path}:{tmp_path}"
    assert called[1:6] == ["exec", "--bind", binds, f"{tmp_path}/my.sif", "bash"]


def test_apptainer_takes_a_bare_name_for_one_of_docker_hub_as_pyxis_does(tmp_path: Path) -> None:
    assert "docker://pytorch/pytorch:2.9" in apptainer(run(tmp_path, "apptainer", "pytorch/pytorch:2.9"))
    assert "oras://ghcr.io/a/b" in apptainer(run(tmp_path / "2", "apptainer", "oras://ghcr.io/a/b"))


def test_a_mount_that_the_option_cannot_carry_is_refused(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    for runtime, mounts in (("pyxis", {"/a,b": "/a"}), ("apptainer", {"/a:b": "/a"}), ("docker", {})):
        update = {"container": {"runtime": runtime, "image": "x.sif", "mounts": mounts}}
        with pytest.raises(RenderError):
            write(tmp_path, stub, Cluster.model_validate({**CLUSTER.model_dump(), **update}))
