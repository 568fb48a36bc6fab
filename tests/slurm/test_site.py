"""What a site offers: read from recorded answers, turned into profiles, held against jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.memory.estimate import Estimate
from launcher.planning.plan import make_plan
from launcher.schedulers.login import Answer, LocalLogin
from launcher.schedulers.slurm import checks
from launcher.schedulers.slurm.detect import as_yaml, choose, name_of, parse_answers
from launcher.schedulers.slurm.feasibility import Feasibility
from launcher.schedulers.slurm.gpu_types import likely_types
from launcher.schedulers.slurm.site import Site, gpus_of, site
from launcher.spec.cluster import Cluster, Node
from launcher.spec.job import Job
from launcher.spec.load import load_cluster
from tests.slurm.recorded import answers

SITES = ("22.05.8-site", "22.05.8-limits", "22.05.8-no-accounting", "other-partitions")
NODE = {"gpu": {"type": "A100 40GB", "count": 4, "memory": "39GiB"}, "cpus": 128, "memory": "400GiB"}


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:2", (("", 2),)),
        ("gpu:a100:4(S:0-1),nvme:3500", (("a100", 4),)),
        ("gpu:tesla:2(S:0,2),gpu:kepler:1(S:1),shard:8", (("tesla", 2), ("kepler", 1))),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-7)", (("nvidia_a100-sxm4-80gb", 8),)),
        ("gpu:a100_1g.5gb:28", (("a100_1g.5gb", 28),)),
        ("mps:400,craynetwork:4", ()),
    ],
)
def test_gres_as_sites_write_it(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("gres_type", "labels"),
    [
        ("nvidia_h100_80gb_hbm3", ["H100"]),
        ("nvidia_a100-sxm4-40gb", ["A100 40GB"]),
        ("a100_80gb_pcie", ["A100 80GB PCIe"]),
        ("A100", ["A100 40GB", "A100 40GB PCIe", "A100 80GB", "A100 80GB PCIe"]),
        ("l40s", ["L40S"]),
        ("l4", ["L4"]),
        ("rtxa6000", ["RTX A6000"]),
        ("rtx_6000_ada", ["RTX 6000 Ada"]),
        ("gh200", ["GH200"]),
        ("a100_1g.5gb", []),
        ("tesla", []),
    ],
)
def test_which_gpu_a_gres_type_means(gres_type: str, labels: list[str]) -> None:
    assert [gpu.label for gpu in likely_types(gres_type)] == labels


def test_a_feature_of_the_node_tells_which_a100_it_is() -> None:
    assert {gpu.memory for gpu in likely_types("a100", ["a100-80gb", "ib"])} == {79.1}


@pytest.mark.parametrize("where", SITES)
def test_every_detected_profile_loads(tmp_path: Path, where: str) -> None:
    nothing = Answer(127, "", "")
    told = answers(where) | {
        "nvidia-smi": nothing,
        "places": Answer(0, "/home/a b\n\n/usr/bin/python3\n", ""),
        "pyxis": Answer(0, "", ""),
        "apptainer": nothing,
    }
    seen = parse_answers(told, "me@login.example")
    assert seen.choices
    names = [name_of(seen, choice) for choice in seen.choices]
    assert len(set(names)) == len(names)
    for name, choice in zip(names, seen.choices, strict=True):
        file = tmp_path / f"{name}.yaml"
        file.write_text(as_yaml(seen, choice))
        cluster = load_cluster(file)
        assert cluster.name == name and cluster.login == "me@login.example"
        assert cluster.slurm is not None and cluster.slurm.partition == choice.partition.name
        line = next(line for line in file.read_text().splitlines() if line.startswith("  partition: "))
        unlimited = choice.partition.max_time == float("inf")
        assert "without resources.time" in line and ("no maximum time; 1h " in line) == unlimited
        assert cluster.gpus_per_node == choice.gpus and cluster.max_nodes <= choice.nodes


def test_what_a_profile_says_of_a_partition_with_two_kinds_of_gpu() -> None:
    nothing = Answer(1, "", "")
    told = answers("other-partitions") | dict.fromkeys(("nvidia-smi", "pyxis", "apptainer"), nothing)
    seen = parse_answers(told | {"places": Answer(0, "/home/u\n/scratch/u\n\n", "")})
    choice = choose(seen, "gpu", "a100")
    assert choice is not None
    text = as_yaml(seen, choice)
    assert "    type: A100 40GB   # Slurm calls it `a100`" in text
    assert "max_nodes: 20" in text and "gres_type: a100" in text and "runs: /scratch/u/launcher-runs" in text
    assert "--partition, --gpu" in text and "JobRequeue=0" in text
    slices = choose(seen, "gpu", "a100_1g.5gb")
    assert slices is not None and "    memory: 5GB\n" in as_yaml(seen, slices)
    cancel = choose(seen, "agro-b", None)
    assert cancel is not None and "preempted here (CANCEL)" in as_yaml(seen, cancel)
    assert choose(seen, "gpu", "h100") is None


def test_the_gpu_of_the_login_node_names_the_nodes_where_they_are_alike() -> None:
    nothing = Answer(1, "", "")
    smi = {"nvidia-smi": Answer(0, "NVIDIA A100-SXM4-40GB, 40960\n", "")}
    told = answers("other-partitions") | dict.fromkeys(("pyxis", "apptainer", "places"), nothing) | smi
    seen = parse_answers(told)
    a100, v100 = choose(seen, "gpu", "a100"), choose(seen, "gpu", "v100")
    assert a100 is not None and a100.device == "NVIDIA A100-SXM4-40GB" and a100.device_memory == 40 * 2**30
    assert v100 is not None and v100.device == ""


def request(where: str | Site, slurm: dict[str, object], **resources: object) -> Feasibility:
    cluster = Cluster.model_validate(
        {"name": "c", "scheduler": "slurm", "max_nodes": 99, "node": NODE, "slurm": slurm}
    )
    job = Job.model_validate(
        {
            "name": "j",
            "command": ["true"],
            "batch": {"global": 2520},
            "resources": {"gpus_per_node": 2} | resources,
        }
    )
    here = site(answers(where)) if isinstance(where, str) else where
    return Feasibility(cluster, job, make_plan(job, cluster), here)


@pytest.mark.parametrize(
    ("where", "slurm", "resources", "said"),
    [
        ("22.05.8-site", {"partition": "gpu"}, {}, "no partition gpu here; there are main, scavenge, short"),
        (
            "22.05.8-site",
            {"partition": "short"},
            {"time": "20m"},
            "20m asked for, partition short allows 10m",
        ),
        (
            "22.05.8-site",
            {"partition": "short"},
            {},
            "partition short gives 1m to a job without one, and the run is asked to stop 2m before its end",
        ),
        ("22.05.8-site", {}, {"nodes": 4}, "resources.nodes: 4 asked for, partition main gives 3"),
        ("22.05.8-site", {}, {"gpus_per_node": 3}, "3 GPUs on one node asked for; partition main has 2 x"),
        ("22.05.8-site", {"gres_type": "a100"}, {}, "no node of partition main has GPUs of type a100"),
        (
            "22.05.8-site",
            {},
            {"memory_per_node": "8GiB"},
            "8 GiB asked for, a node of partition main gives 3.906",
        ),
        ("22.05.8-site", {}, {"cpus_per_node": 9}, "9 asked for, a node of partition main gives 8"),
        ("22.05.8-site", {"constraint": "ib"}, {}, "too few nodes of partition main have ib"),
        ("22.05.8-limits", {"qos": "nix"}, {}, "there is no QOS nix here; yours are high, normal"),
        ("22.05.8-limits", {"account": "nix"}, {}, "nix is not one of yours; yours are lab, root"),
        ("22.05.8-limits", {"qos": "high"}, {}, "2 GPUs in all, QOS high gives 1 (MaxTRES)"),
        ("22.05.8-limits", {}, {"time": "2h"}, "2h asked for, QOS normal allows 1h"),
        ("other-partitions", {}, {}, "the site has no default partition"),
        (
            "other-partitions",
            {"partition": "agro-b", "qos": "high"},
            {},
            "does not take high; it takes normal, gpupreempt",
        ),
        ("other-partitions", {"partition": "gputest"}, {"nodes": 3}, "partition gputest gives 2"),
        (
            "other-partitions",
            {"partition": "gpu", "gres_type": "h100"},
            {},
            "h100; there are 28 x a100_1g.5gb, 4 x a100, 4 x v100",
        ),
    ],
)
def test_what_can_never_start_is_refused_in_words(
    where: str, slurm: dict[str, object], resources: dict[str, object], said: str
) -> None:
    refusals = list(request(where, slurm, **resources).refusals())
    assert len(refusals) == 1 and said in refusals[0]


def test_what_fits_is_not_refused_and_one_of_several_partitions_is_enough() -> None:
    assert not list(request("22.05.8-site", {"partition": "main"}, nodes=3, time="1d").refusals())
    assert not list(request("22.05.8-site", {"partition": "short,main"}, time="1d").refusals())
    assert not list(
        request("other-partitions", {"partition": "gpu", "gres_type": "a100"}, nodes=20).refusals()
    )


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"gres_type": "a100"}, "resources.gpus_per_node: 2 GPUs of type a100 in all, QOS normal gives 1"),
        ({"gres_type": "v100"}, ""),
        ({}, ""),
        ({"account": "root", "gres_type": "a100", "qos": "high"}, ""),
    ],
)
def test_a_limit_of_one_type_of_gpu_is_for_jobs_that_name_it(slurm: dict[str, object], said: str) -> None:
    here = site(answers("22.05.8-limits"))
    assert here.qos is not None
    asked = request(replace(here, qos={"normal": {"MaxTRESPU": "gres/gpu:a100=1"}, "high": {}}), slurm)
    parse_answers = list(asked._limits(here.partitions["main"]))
    assert len(parse_answers) == bool(said) and (not said or said in parse_answers[0])


def test_of_several_accounts_of_which_one_takes_the_job_none_refuses_it() -> None:
    here = site(answers("22.05.8-limits"))
    assert here.associations is not None
    rows = tuple({**row, "MaxWall": "10"} if row["Account"] == "lab" else row for row in here.associations)
    narrow = replace(here, associations=rows, qos={})
    main = here.partitions["main"]
    assert not list(request(narrow, {}, time="30m")._limits(main))
    (refused,) = request(narrow, {"account": "lab"}, time="30m")._limits(main)
    assert refused.startswith(
        "resources.time: 30m asked for, account lab allows 10m (MaxWall): ask for no more"
    )


@pytest.mark.parametrize(
    ("site_", "slurm", "said"),
    [
        ({}, {}, "partition main does not take your default, lab; it takes other; none of yours may use it"),
        ({}, {"account": "lab"}, "slurm.account: partition main does not take lab; it takes other"),
        ({"given_account": "lab"}, {"account": "other"}, "SBATCH_ACCOUNT: partition main does not take lab"),
        ({"config": {"JobSubmitPlugins": "lua"}}, {}, ""),  # which may choose an account
        ({"default_account": None}, {}, ""),
        ({"default_account": "below"}, {}, ""),  # newer versions take it
    ],
)
def test_an_account_that_a_partition_is_not_for_is_refused_where_it_is_known(
    site_: dict[str, Any], slurm: dict[str, object], said: str
) -> None:
    here = site(answers("22.05.8-limits"))
    main = here.partitions["main"]
    closed = replace(main, fields={**main.fields, "AllowAccounts": "other"})
    rows = ({"Account": "lab", "User": "u"}, {"Account": "below", "User": "", "ParentName": "other"})
    known = {"default_account": "lab", "associations": rows, "config": {}} | site_
    parse_answers = list(request(replace(here, **known), slurm)._access_refusals(closed))
    assert len(parse_answers) == bool(said) and (not said or said in parse_answers[0])


def test_an_array_that_is_too_large_is_refused_with_the_limit() -> None:
    asked = request("22.05.8-site", {"partition": "main"}, time="1h")
    for config, said in (
        (
            {"MaxArraySize": "1001"},
            "1002 runs requested, an array may have 1001 tasks here (MaxArraySize)",
        ),
        ({"MaxArraySize": "1002"}, ""),
        (
            {"SchedulerParameters": "bf_interval=1,max_array_tasks=100"},
            "(SchedulerParameters=max_array_tasks)",
        ),
    ):
        parse_answers = list(replace(asked, site=replace(asked.site, config=config), tasks=1002).refusals())
        assert len(parse_answers) == bool(said) and (not said or said in parse_answers[0])


def test_without_node_cpus_the_number_of_the_nodes_is_told() -> None:
    asked = request("22.05.8-site", {"partition": "main"}, time="1h", gpus_per_node=0)
    unknown = replace(asked, cluster=asked.cluster.model_copy(update={"node": Node()}))
    (told,) = (one for one in unknown.warnings() if one.startswith("node.cpus"))
    assert "nodes of partition main have 8 CPUs" in told
    crowded = Job.model_validate(
        {**asked.job.model_dump(by_alias=True), "resources": {"ranks_per_node": 9, "gpus_per_node": 0}}
    )
    plan = make_plan(crowded, unknown.cluster)
    (refused,) = replace(unknown, job=crowded, plan=plan).refusals()
    assert "resources.cpus_per_node: 9 asked for, a node of partition main gives 8" in refused


def test_a_qos_may_lift_what_its_partition_allows() -> None:
    here = site(answers("22.05.8-limits"))
    asked = {"partition": "short", "qos": "high"}
    assert any("allows 10m" in one for one in request(here, asked, time="20m", gpus_per_node=1).refusals())
    lifting = replace(here, qos={"high": {"Flags": "DenyOnLimit,PartitionTimeLimit"}, "normal": {}})
    assert not list(request(lifting, asked, time="20m", gpus_per_node=1).refusals())


def test_what_sbatch_says_to_a_test_is_told_without_its_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = "sbatch: unrecognized option '--nix'\nTry \"sbatch --help\" for more information\n"
    told = answers("22.05.8-site") | {"test": Answer(1, "", said), "paths": Answer(0, "dw\n", "")}
    monkeypatch.setattr(checks, "ask", lambda login, questions: told)
    asked = request("22.05.8-site", {"partition": "main"}, time="1h")
    parse_answers = checks.problems(LocalLogin(), asked.cluster, [("", asked.job, asked.plan)], "")
    assert parse_answers.refusals == ("sbatch --test-only: unrecognized option '--nix'",)


def test_what_may_go_wrong_is_a_warning() -> None:
    warned = list(request("other-partitions", {"partition": "gpu"}).warnings())
    assert "no resources.time: each Slurm job of this run gets partition gpu's 10m" in warned
    assert "slurm.gres_type is not set, and the job may get any of a100, a100_1g.5gb, v100" in warned
    assert "but a GPU of type v100 has 31.7 GiB at most" in " ".join(warned)


def test_what_slurm_takes_without_a_look_at_it_is_a_warning() -> None:
    slurm = {"partition": "main", "account": "nix", "gres_type": "h100"}
    asked = request("22.05.8-site", slurm, gpus_per_node=0, time="1h")
    assert not list(asked.refusals())
    assert list(asked.warnings()) == [
        "slurm.account: nix was not checked: this site's Slurm accepts any value",
        "slurm.gres_type: no node of partition main has GPUs of type h100",
    ]


def test_host_memory_that_the_site_gives_by_default_is_held_against_the_plan() -> None:
    for partition, gives in (
        ("cray", "57.5 GiB (DefMemPerGPU=29440 for 2 GPUs)"),
        ("agro-b", "562.5 GiB (DefMemPerCPU=9000 for 64 CPUs)"),
    ):
        plain = request("other-partitions", {"partition": partition}, time="1h")
        needs = Estimate(
            peaks=(), reserved=0, overhead={}, host={"x": 700 * 2**30}, band=0.1, basis="formulas"
        )
        plan = plain.plan.model_copy(update={"estimate": needs})
        warned = list(Feasibility(plain.cluster, plain.job, plan, plain.site).warnings())
        assert any(gives in one and "set resources.memory_per_node" in one for one in warned), warned
