"""How a Slurm step runs inside the profile's container: pyxis (enroot), Apptainer, or none."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.render import quote
from launcher.render.quote import RenderError
from launcher.spec import variables

if TYPE_CHECKING:
    from launcher.render.values import Target

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Container:
    """Options that run a step in the container. Empty if the runtime is `none`."""

    step_options: tuple[str, ...] = ()
    "Further srun options (pyxis). Never #SBATCH: the batch script runs outside the container, where srun is."
    prefix: tuple[str, ...] = ()
    "Command that starts the payload (apptainer exec ...)."
    exported: tuple[str, ...] = ()
    "Variables of the batch script that override the image's by the prefix APPTAINERENV_."
    image_file: str | None = None
    "Path on the nodes; None for an image in a registry."
    mounts: Pairs = ()
    "Pairs of (path on the node, path in the container)."


def container(target: Target) -> Container:
    """How a step of the run is started in its container. Raises RenderError."""
    runtime, image = target.cluster.container.runtime, target.image
    if runtime == "none":
        return Container()
    if runtime not in ("pyxis", "apptainer"):
        raise RenderError(f"container.runtime {runtime}: scheduler slurm takes pyxis or apptainer")
    if image is None:
        raise RenderError(f"container.runtime {runtime} needs an image: `image:` in the job or the cluster")
    quote.image(image)
    file = _file(image, target.workdir)
    mounts = _mounts(target)
    for pair in mounts:
        quote.list_items(pair, ",:", "a container mount")
    listed = ",".join(f"{host}:{inside}" for host, inside in mounts)
    if runtime == "apptainer":
        # `exec` starts no entrypoint (%runscript). The node's /dev/shm and home are mounted by default.
        gpus = ("--nv",) if target.gpus_per_node else ()
        without_home = ("--no-home",) if _mount_home(target) is False else ()
        remote = image if "://" in image else f"docker://{image}"
        prefix = ("apptainer", "exec", *gpus, *without_home, "--bind", listed, file or remote)
        return Container((), prefix, _passed_in(target), file, mounts)
    options = [
        f"--container-image={file or image}",
        f"--container-mounts={listed}",
        "--no-container-entrypoint",
    ]
    home = _mount_home(target)
    if home is not None:
        options.append("--container-mount-home" if home else "--no-container-mount-home")
    # Without this list a variable of the image overrides ours (pyxis' README, `--container-env`).
    names = [*_passed_in(target), *(["CUDA_VISIBLE_DEVICES"] if _scheduler_chooses_gpus(target) else [])]
    options.append(f"--container-env={','.join(names)}")
    return Container(tuple(options), (), (), file, mounts)


def _mount_home(target: Target) -> bool | None:
    """Whether to mount the home directory; None leaves it to the site. Raises RenderError."""
    wanted = target.cluster.container.mount_home
    inside = [secret.file for secret in target.job.secrets if (secret.file or "").startswith("~/")]
    if inside and wanted is False:
        raise RenderError(
            f"container.mount_home is false, and a secret of the job is read from {inside[0]}: give it as a"
            " variable (`env:`), or in a file outside the home directory"
        )
    return True if inside else wanted


def _file(image: str, workdir: str) -> str | None:
    """The absolute path of an image file; None for an image reference.

    Without a leading `/` or `./` enroot mistakes a file for an image name (NVIDIA/pyxis#127).
    """
    if "://" in image:
        return None
    is_file = image.endswith((".sqsh", ".squashfs", ".sif")) or image.startswith(("/", "./", "../"))
    return posixpath.normpath(posixpath.join(workdir, image)) if is_file else None


def _mounts(target: Target) -> Pairs:
    """The profile's mounts, and every folder that the run uses outside of them."""
    mounts = list(target.cluster.container.mounts.items())
    secrets = [secret.file for secret in target.job.secrets if secret.file is not None]
    inside = [path for _, path in mounts]
    for path in (target.run_dir, target.workdir, *(file for file in secrets if posixpath.isabs(file))):
        if not any(path == mount or path.startswith(mount.rstrip("/") + "/") for mount in inside):
            mounts.append((path, path))
            inside.append(path)
    return tuple(mounts)


def _passed_in(target: Target) -> tuple[str, ...]:
    """Variables that the batch script passes in. start.sh, inside, sets the profile's and the job's last.

    PYTHONNOUSERSITE: otherwise packages in ~/.local of a mounted home would take precedence over the image's.
    """
    names = [secret.env or secret.name for secret in target.job.secrets]
    if target.cluster.setup:
        names.append(variables.SETUP_DONE)
    return tuple(dict.fromkeys([*names, "PYTHONNOUSERSITE"]))


def _scheduler_chooses_gpus(target: Target) -> bool:
    section = target.cluster.section
    return bool(target.gpus_per_node) and section is not None and section.assigns_gpus
