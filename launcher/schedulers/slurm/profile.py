"""The `slurm:` section of a cluster profile."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from launcher.spec.scheduler_section import Section
from launcher.spec.value import number_as_text


def _generic_resource(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+){0,2}", text) is None:
        raise ValueError(f"{text!r} is not a generic resource: write name:count or name:type:count")
    if text.partition(":")[0] == "gpu":
        raise ValueError("a job asks for GPUs by resources.gpus_per_node; gpu_request sets the option used")
    return text


def _long_option(text: str) -> str:
    if re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\r\n]*)?", text) is None:
        raise ValueError(f"{text!r} is not a long option of srun: write --name or --name=value")
    return text


def _one_cluster(name: str) -> str:
    if name == "all":
        raise ValueError("name one cluster; `all` is not possible, because a job runs in one cluster")
    return name


class Slurm(Section):
    """Options of sbatch."""

    requeues: ClassVar[bool] = True

    partition: str | None = None
    "Partition, or several with commas."
    account: str | None = None
    "Account to charge."
    qos: str | None = None
    "Quality of service."
    constraint: str | None = None
    "Features that the nodes must have."
    reservation: str | None = None
    "Reservation to use."
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    "Option that asks for GPUs. none: the site gives them without a request."
    gres_type: str | None = None
    "GPU type as Slurm names it: the word between `gpu:` and the count."
    gres: tuple[Annotated[str, AfterValidator(_generic_resource)], ...] = ()
    "Generic resources of each node other than GPUs."
    clusters: Annotated[str, AfterValidator(_one_cluster)] | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    "Name of this cluster (`--clusters`), if the site has several and another one is the default."
    exclusive: bool = False
    "Ask for whole nodes. Without `memory_per_node` of the job, also ask for all their memory."
    signal_seconds: PositiveInt = 120
    "How long before the time limit the run is asked to save and stop."
    extra: dict[
        str, Annotated[str | bool, BeforeValidator(number_as_text, json_schema_input_type=str | bool | int)]
    ] = {}
    "Any other option of sbatch by its long name; true for a flag."
    srun_options: tuple[Annotated[str, AfterValidator(_long_option)], ...] = ()
    "Further options of the `srun` that starts the ranks."
    comment: bool = True
    "Write the run's id into the job's comment. false: for sites that use comments themselves."

    @property
    def assigns_gpus(self) -> bool:
        return self.gpu_request != "none"
