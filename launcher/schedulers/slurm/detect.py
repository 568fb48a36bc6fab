"""Write a first profile of a site from what its Slurm and login node report, per partition and GPU type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.planning.hardware import GpuType, memory_of
from launcher.schedulers.login import NOT_FOUND, Answer, Login, LoginError, ask, last_line
from launcher.schedulers.slurm.gpu_types import likely_types
from launcher.schedulers.slurm.site import (
    MIB,
    RUNTIMES,
    Nodes,
    Partition,
    Site,
    allowed_qos,
    default_memory,
    node_count,
    questions,
    site,
)
from launcher.spec.quantities import format_bytes, format_duration, written_bytes
from launcher.spec.records import ClusterRecord


@dataclass(frozen=True)
class Choice:
    """One way to use the site: the nodes of a partition that have the same GPUs."""

    partition: Partition
    gres_type: str
    "Empty for untyped GPUs, and if there are no GPUs."
    gpus: int
    nodes: int
    cpus: int
    memory: int
    "Bytes."
    features: frozenset[str]
    gpu: GpuType | None
    others: tuple[GpuType, ...]
    "Other GPUs that the same GRES type may mean."
    device: str
    "The name that nvidia-smi reports; empty without nvidia-smi."
    device_memory: int

    @property
    def words(self) -> str:
        kind = self.device or (self.gpu.label if self.gpu else self.gres_type or "GPU")
        gpus = f"{self.gpus}x {kind}" if self.gpus else "no GPUs"
        return f"partition {self.partition.name}: {self.nodes} nodes with {gpus}"


@dataclass(frozen=True)
class DetectedSite:
    """What detection has found about a site."""

    site: Site
    login: str | None
    choices: tuple[Choice, ...]
    "Best first: most GPUs in total, and the default partition before others."
    home: str
    scratch: str
    python: str
    pyxis: bool
    apptainer: bool

    @property
    def cluster(self) -> str:
        return self.site.config.get("ClusterName", "slurm")


def detect(login: Login, host: str | None = None) -> DetectedSite:
    """Query the site. `host` is what the profile will name as its `login:`. Raises LoginError."""
    answers = ask(login, {**questions(), **_questions()})
    controller = answers["partitions"]
    if controller.code != 0:
        said = last_line(controller.err or controller.out)
        raise LoginError(_no_slurm(login.name, host, controller.code, said))
    return parse_answers(answers, host)


def _no_slurm(name: str, host: str | None, code: int, error: str) -> str:
    if code == NOT_FOUND:
        what = "Slurm is not installed (there is no `scontrol`)"
    else:
        what = "Slurm's controller does not answer, or this is not a host of a Slurm cluster"
    option = f"--host {host}" if host is not None else "--host HOST"
    login = "" if host is not None else "name a login node (--login HOST), or "
    return (
        f"{name}: {what}; {login}ask a host without a batch system ({option}){f' [{error}]' if error else ''}"
    )


def _questions() -> dict[str, list[str]]:
    return {
        "nvidia-smi": ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
        "places": ["sh", "-c", 'printf "%s\\n" "$HOME" "${SCRATCH:-}" "$(command -v python3)"'],
        **RUNTIMES,
    }


def parse_answers(answers: Mapping[str, Answer], host: str | None = None) -> DetectedSite:
    here = site(answers)
    home, scratch, python = [*answers["places"].out.splitlines(), "", "", ""][:3]
    device, memory = _device(answers["nvidia-smi"])
    choices = [
        choice
        for partition in here.partitions.values()
        for choice in _choices(here, partition, device, memory)
    ]
    choices.sort(
        key=lambda choice: (choice.gpus == 0, not choice.partition.default, -choice.gpus * choice.nodes)
    )
    return DetectedSite(
        site=here,
        login=host,
        choices=tuple(choices),
        home=home,
        scratch=scratch,
        python=python,
        pyxis=answers["pyxis"].code == 0,
        apptainer=answers["apptainer"].code == 0,
    )


def _device(answer: Answer) -> tuple[str, int]:
    """Return name and memory of the login node's own GPU, or ("", 0). It may differ from the nodes' GPUs."""
    rows = [line.rsplit(",", 1) for line in answer.out.splitlines() if answer.code == 0 and "," in line]
    if not rows or not rows[0][1].strip().isdigit():
        return "", 0
    return rows[0][0].strip(), int(rows[0][1]) * MIB


def _choices(site_: Site, partition: Partition, device: str, device_memory: int) -> Iterator[Choice]:
    groups = site_.of(partition.name)
    types = sorted({name for group in groups for name, _ in group.gpus})
    untyped = not types
    for type_ in [None] if untyped else types:
        same = [group for group in groups if type_ is None or type_ in dict(group.gpus)]
        if not same:
            continue
        counts: dict[int, int] = {}
        for group in same:
            gpus = _of_type(group, type_)
            counts[gpus] = counts.get(gpus, 0) + group.count
        gpus = max(counts, key=lambda count: (counts[count], count))
        alike = [group for group in same if _of_type(group, type_) == gpus]
        features = frozenset.intersection(*(group.features for group in alike))
        likely = likely_types(type_ or "", features)
        same_device = bool(device) and gpus > 0 and (not type_ or _names_device(type_, device))
        yield Choice(
            partition=partition,
            gres_type=type_ or "",
            gpus=gpus,
            nodes=node_count(alike),
            cpus=min(group.cpus for group in alike),
            memory=min(group.memory for group in alike),
            features=features,
            gpu=likely[0] if likely else None,
            others=tuple(likely[1:]),
            device=device if same_device else "",
            device_memory=device_memory if same_device else 0,
        )


def _of_type(group: Nodes, type_: str | None) -> int:
    return 0 if type_ is None else dict(group.gpus)[type_]


def _names_device(gres_type: str, device: str) -> bool:
    return any(re.fullmatch(gpu.names, device) for gpu in likely_types(gres_type))


def choose(detected: DetectedSite, partition: str | None, gpu: str | None) -> Choice | None:
    """Return the best choice with this partition and GPU type, or None."""
    fits = (
        choice
        for choice in detected.choices
        if partition in (None, choice.partition.name) and gpu in (None, choice.gres_type)
    )
    return next(fits, None)


def describes(detected: DetectedSite, choice: Choice, cluster: ClusterRecord) -> bool:
    """Return whether a profile's jobs go to this partition: by name, or because it is the default one."""
    if cluster.login != detected.login or cluster.scheduler != "slurm":
        return False
    partition = cluster.slurm.partition
    return choice.partition.default if partition is None else partition == choice.partition.name


def name_of(detected: DetectedSite, choice: Choice) -> str:
    name = "-".join(filter(None, (detected.cluster, choice.partition.name, choice.gres_type)))
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")


def as_yaml(detected: DetectedSite, choice: Choice) -> str:
    """Return the profile as YAML, with a comment wherever a person must check a value."""
    return (
        "\n".join([*_head(detected, choice), *_node(choice), *_paths(detected), *_slurm(detected, choice)])
        + "\n"
    )


def _head(detected: DetectedSite, choice: Choice) -> Iterator[str]:
    version = detected.site.version or "of unknown version"
    yield f"# By `launcher clusters detect`, from what Slurm {version} said. Lines with CHECK are guesses."
    others = [other.words for other in detected.choices if other is not choice]
    if others:
        yield "# Other ways to use this site, each a profile of its own (--partition, --gpu):"
        yield from (f"#   {words}" for words in others)
    yield f"name: {_text(name_of(detected, choice))}"
    yield f"description: {_text(f'Slurm, {choice.words}')}"
    yield "scheduler: slurm"
    if detected.login is not None:
        yield f"login: {_text(detected.login)}"
    most = min(choice.partition.max_nodes or choice.nodes, choice.nodes)
    yield f"max_nodes: {most}"


def _node(choice: Choice) -> Iterator[str]:
    yield "node:"
    if choice.gpus:
        yield "  gpu:"
        yield from _gpu(choice)
        yield f"    count: {choice.gpus}"
    yield f"  cpus: {choice.cpus}"
    yield f"  memory: {written_bytes(choice.memory)}   # Slurm's RealMemory: what jobs may have of a node"


def _gpu(choice: Choice) -> Iterator[str]:
    gres = f"`{choice.gres_type}`" if choice.gres_type else "no type"
    if choice.device:
        yield f"    type: {_text(choice.device)}   # by nvidia-smi on the login node"
        yield f"    memory: {written_bytes(choice.device_memory)}"
    elif choice.gpu is not None:
        also = ", ".join(f"{gpu.label} ({gpu.memory} GiB)" for gpu in choice.others)
        check = f"; CHECK, it may also be {also}" if also else ""
        yield f"    type: {_text(choice.gpu.label)}   # Slurm calls it {gres}{check}"
        yield f"    memory: {written_bytes(memory_of(choice.gpu))}   # what a process can use"
    else:
        yield f"    # CHECK both: Slurm says {gres}; `nvidia-smi --query-gpu=name,memory.total --format=csv`"
        yield f"    type: {_text(choice.gres_type or 'GPU')}"
        yield f"    memory: {_slice(choice.gres_type)}"


def _slice(gres_type: str) -> str:
    """Return the memory of a MIG slice, which its name contains: `a100_3g.20gb`."""
    size = re.search(r"\d+g\.(\d+)gb", gres_type)
    return f"{size[1]}GB" if size else "16GiB"


def _paths(detected: DetectedSite) -> Iterator[str]:
    runtime = "pyxis" if detected.pyxis else "apptainer" if detected.apptainer else None
    if runtime is not None:
        yield f"# {runtime} is here: to run in a container, take these lines in."
        yield "# container:"
        yield f"#   runtime: {runtime}"
        yield f"#   image: /shared/images/image.{'sqsh' if runtime == 'pyxis' else 'sif'}"
        yield "#   mounts: {/shared: /shared}"
    root = detected.scratch or detected.home
    yield "paths:"
    yield f"  runs: {_text(f'{root}/launcher-runs')}   # CHECK: on a file system that all nodes see"
    yield "  # CHECK: has launcher with its extra `train`; the same path on every node"
    yield f"  python: {_text(detected.python or 'python3')}"
    yield "# setup:"
    yield "#   - module load cuda   # shell of yours, run by the batch script before the nodes start"


def _slurm(detected: DetectedSite, choice: Choice) -> Iterator[str]:
    partition, here = choice.partition, detected.site
    yield "# network.interface stays unset: NCCL and gloo choose. network.inter_node helps `launcher plan`."
    yield "slurm:"
    yield f"  partition: {_text(partition.name)}   # {_limit(partition)}"
    yield from _account(here)
    if choice.gpus:
        old = here.config.get("SelectType", "").endswith("cons_res")
        yield f"  gpu_request: {'gres' if old else 'gpus-per-node'}"
        if choice.gres_type:
            yield f"  gres_type: {_text(choice.gres_type)}"
    if partition.exclusive:
        yield "  exclusive: true   # the partition gives whole nodes only"
    if partition.preempt_mode not in ("", "OFF"):
        yield f"  # Jobs can be preempted here ({partition.preempt_mode}): they go on from a checkpoint."
    if here.config.get("JobRequeue") == "0":
        yield "  # The site does not requeue jobs (JobRequeue=0): a run goes on in a new job."
    yield "  signal_seconds: 180   # for a checkpoint before the time limit"
    default = default_memory(here, partition, choice.cpus, choice.gpus)
    if default is not None and not partition.exclusive and default[0] < choice.memory // 2:
        yield f"  # A job that asks for no memory gets {format_bytes(default[0])} of a node ({default[1]}):"
        yield "  # give resources.memory_per_node in the job, or here `extra: {mem: 0}` for all of it."


def _limit(partition: Partition) -> str:
    given = partition.time_given
    without = ""
    if given is not None and given not in (float("inf"), partition.max_time):
        without = f"; {format_duration(given)} without resources.time"
    if partition.max_time is None or partition.max_time == float("inf"):
        return f"no maximum time{without}"
    longest = format_duration(partition.max_time)
    return f"at most {longest} for a job; a longer training continues in the next job by itself{without}"


def _account(here: Site) -> Iterator[str]:
    accounts, qos = here.accounts(), allowed_qos(here.own_associations)
    if len(accounts) == 1:
        yield f"  account: {_text(accounts[0])}"
    elif accounts:
        yield f"  # account: one of {', '.join(accounts)}; left out, your default account"
    if len(qos) > 1:
        yield f"  # qos: one of {', '.join(qos)}; left out, your default QOS"


def _text(value: str) -> str:
    """Return a YAML scalar, unquoted if it cannot be misread."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./@ -]*[A-Za-z0-9_/]", value) is not None
    if plain and value.lower() not in ("true", "false", "null", "yes", "no", "on", "off"):
        return value
    return json.dumps(value, ensure_ascii=False)
