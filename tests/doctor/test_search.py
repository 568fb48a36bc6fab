"""Settings that cure a fault are found, and written into the profile with the reason beside them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.api.doctor import changed_profile, found_earlier, write_profile
from launcher.doctor.facts import Facts, facts_of
from launcher.doctor.options import Options
from launcher.doctor.order_files import Orders
from launcher.doctor.outcome import Outcome
from launcher.doctor.profile_change import own_file, with_facts
from launcher.doctor.results import Results, results_of
from launcher.doctor.settings import NCCL, Setting, candidates, fastest, gain
from launcher.doctor.values import Measured
from launcher.render.shipped import clusters_dir
from launcher.rundir.layout import RunDir
from launcher.spec.load import load_cluster
from tests.doctor.nodes import Nodes, sick
from tests.doctor.test_nodes import PATCH, faulty

PROFILE = """\
# Our cluster.
name: spaces
scheduler: ssh
network:
  interface: eth1   # as the data sheet says
ssh:
  hosts: [n0, n1]
"""


def test_the_cheapest_explanation_is_tried_first() -> None:
    on_one = [one.text for one in candidates("nccl", "inside", [], several=False)]
    assert on_one[:2] == ["NCCL_SHM_DISABLE=1", "NCCL_P2P_DISABLE=1"]
    assert not any(one.startswith(("NCCL_IB", "NCCL_SOCKET", "NCCL_NET")) for one in on_one)
    on_two = [one.text for one in candidates("nccl", "anywhere", ["ib0", "eth0"], ["mlx5_0"])]
    assert {"NCCL_SOCKET_IFNAME==ib0", "NCCL_IB_HCA==mlx5_0", "NCCL_IB_DISABLE=1"} <= set(on_two)
    assert "NCCL_SHM_DISABLE=1 NCCL_P2P_DISABLE=1" in on_two[len(NCCL) :], "pairs come last"
    assert [one.text for one in candidates("gloo", "between", ["eth0", "eth1"])] == [
        "GLOO_SOCKET_IFNAME=eth0",
        "GLOO_SOCKET_IFNAME=eth1",
    ]
    between = [one.text for one in candidates("nccl", "between", ["eth0"])]
    assert between[:2] == ["NCCL_IB_DISABLE=1", "NCCL_NET_GDR_LEVEL=LOC"], "what fails comes first"
    assert between.index("NCCL_SHM_DISABLE=1") > between.index("NCCL_SOCKET_IFNAME==eth0")
    tuned = {one.text for one in candidates("nccl", "anywhere", [], tune=True)}
    assert {one.text for one in NCCL if one.purpose == "faster"} <= tuned


def test_the_fastest_setting_must_be_clearly_faster() -> None:
    def end(bus: float) -> Outcome:
        return Outcome("ok", sizes=({"bytes": 2**24, "seconds": 1.0, "bus": bus},))

    slow, fast = Setting({"A": "1"}, ""), Setting({"B": "1"}, "")
    assert fastest([(slow, end(1.05e9)), (fast, end(2e9))]) == fast
    assert fastest([(slow, end(1.05e9)), (fast, Outcome("hang"))]) == slow
    assert gain([(end(1e9), end(2e9)), (end(1.1e9), end(1.9e9))]) == (1.1e9, 1.9e9)
    assert gain([(end(1e9), end(2e9)), (end(1.9e9), end(2e9))]) is None, "the second turn is as fast without"
    assert gain([(end(1e9), Outcome("hang"))]) is None


@pytest.mark.parametrize("name", [file.stem for file in sorted(clusters_dir().glob("*.yaml"))])
def test_a_profile_keeps_its_comments_and_values(name: str, tmp_path: Path) -> None:
    before = (clusters_dir() / f"{name}.yaml").read_text()
    text = with_facts(before, Facts({"NCCL_IB_DISABLE": "1"}, "launcher doctor: all-reduce hangs without it"))
    assert [line for line in before.splitlines() if "#" in line and line not in text.splitlines()] == []
    assert "    # launcher doctor: all-reduce hangs without it\n    NCCL_IB_DISABLE: '1'" in text
    (tmp_path / f"{name}.yaml").write_text(text)
    found, old = load_cluster(tmp_path / f"{name}.yaml"), load_cluster(clusters_dir() / f"{name}.yaml")
    assert found.network.env == {**old.network.env, "NCCL_IB_DISABLE": "1"}
    same: dict[str, Any] = {"network": old.network}
    assert found.model_copy(update=same) == old


ENV = Facts(
    {"NCCL_SHM_DISABLE": "1"}, "launcher doctor, 2026-11-25, run doctor-1: all-reduce hangs without it"
)
FOUR_SPACES = """\
name: four   # a comment
scheduler: ssh
ssh:
    # our hosts
    hosts:
        - a   # the first
        - b
network: {interface: eth0}   # the fabric
"""
SHARED = """\
name: shared
scheduler: local
env: &common
  A: "1"   # for all
network:
  env: *common
"""


def test_a_profile_keeps_its_indentation() -> None:
    before = FOUR_SPACES.splitlines()
    after = with_facts(FOUR_SPACES, ENV).splitlines()
    assert after[:7] == before[:7]
    reason, setting = after[-2:]
    assert (reason.strip(), setting) == (f"# {ENV.why_env}", "        NCCL_SHM_DISABLE: '1'")
    assert "    interface: eth0" in after and any(line.endswith("# the fabric") for line in after)


@pytest.mark.parametrize(
    "network",
    [
        "  interface: eth0\n",
        "  interface: eth0   # the fabric\n  # part of network\n\n",
        "  env:\n    A: '1'\n    # part of env\n",
        "  env:\n    A: '1'\n  # which one\n  interface: eth0\n",
        "  env: {}\n",
        "  env:\n",
        "",
    ],
)
@pytest.mark.parametrize("gpu", ["4", "{type: H100}", "\n    type: H100\n    memory: 80GiB"])
def test_a_comment_stays_before_its_key(network: str, gpu: str) -> None:
    before = (
        f"name: mine\nscheduler: slurm\nnetwork:\n{network}# the nodes\n\n# all alike\n"
        f"node:\n  gpu: {gpu}   # ours\n"
        "  # of hardware threads\n  cpus: 64\n# the partition\nslurm: {partition: gpu}\n# the end\n"
    )
    text = with_facts(before, replace(ENV, gpu_type="A100", gpu_memory="40GiB", why_gpu="by NVML"))
    assert _followers(before).items() <= _followers(text).items()
    env = text.partition("  env:\n")[2].partition("\n#")[0].splitlines()
    assert f"    # {ENV.why_env}" in env and "    NCCL_SHM_DISABLE: '1'" in env


def _followers(text: str) -> dict[str, str]:
    """The first word of the next line that is no comment, by comment; empty at the end."""
    lines = [line for line in text.splitlines() if line.strip()]
    keys = [line.split()[0] if not line.lstrip().startswith("#") else "" for line in lines] + ["the end"]
    return {
        line: next(key for key in keys[number:] if key)
        for number, line in enumerate(lines)
        if line.lstrip().startswith("#") and "part of" not in line
    }


def test_a_mapping_that_other_sections_share_is_copied(tmp_path: Path) -> None:
    text = with_facts(SHARED, ENV)
    (tmp_path / "shared.yaml").write_text(text)
    cluster = load_cluster(tmp_path / "shared.yaml")
    assert cluster.env == {"A": "1"} and cluster.network.env == {"A": "1", "NCCL_SHM_DISABLE": "1"}
    assert "# for all" in text


def test_a_setting_that_is_there_changes_nothing_and_an_older_reason_is_replaced() -> None:
    once = with_facts(PROFILE, ENV)
    assert with_facts(once, ENV) == once
    later = Facts(
        {"NCCL_SHM_DISABLE": "0"}, "launcher doctor, 2026-11-26, run doctor-2: wrong values without it"
    )
    again = with_facts(once, later)
    assert again.count("# launcher doctor, ") == 1 and later.why_env in again
    other = with_facts(
        again, Facts({"NCCL_IB_DISABLE": "1"}, "launcher doctor, 2026-11-27, run doctor-3: hangs")
    )
    assert other.count("# launcher doctor, ") == 2, "the reason of another setting stays"


GUESSED = """\
name: mine   # as Slurm calls it
scheduler: slurm
node:
  gpu:
    type: A100   # Slurm calls it `a100`; CHECK, it may also be A100 40GB (39.4 GiB)
    memory: 79.1GiB   # what a process can use
    count: 4
  cpus: 64
slurm: {partition: gpu}
"""


def results_with(folder: Path, **cluster: Any) -> Results:
    """A doctor's run that found other GPUs than the profile names, and a setting that helps."""
    run = RunDir(folder / "runs/doctor-1")
    run.path.mkdir(parents=True)
    about = {"id": run.id, "job": {"command": Options().command}, "cluster": cluster}
    run.run.write_text(json.dumps({**about, "created": "2026-11-25T12:00:00.000000Z"}))
    run.plan.write_text(json.dumps({"layout": {"nodes": 1, "ranks_per_node": 4, "gpus_per_node": 4}}))
    orders = Orders(run.attempt(0).path / "doctor", 0, 1)
    names = [Measured("gpu-name", 0, "NVIDIA A100-SXM4-40GB", f"GPU {index}") for index in range(4)]
    names += [Measured("gpu-memory", 0, 42_298_834_944, f"GPU {index}") for index in range(4)]
    chosen = {"env": {"NCCL_SHM_DISABLE": "1"}, "explains": "", "before": "all-reduce hangs", "after": ""}
    values = [*names, Measured("chosen", 0, chosen)]
    orders.answer(0, {"values": [asdict(one) for one in values]})
    found = results_of(run)
    assert found is not None
    return found


def test_gpus_that_nvml_names_replace_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(GUESSED)
    gpu = {"type": "A100", "memory": 84_934_656_000, "count": 4}
    results = results_with(tmp_path, name="mine", node={"gpu": gpu})
    change = changed_profile(results, "mine.yaml")
    assert change is not None
    why = "# by NVML, launcher doctor, 2026-11-25, run doctor-1"
    assert f"type: NVIDIA A100-SXM4-40GB  {why}\n    memory: 39.3GiB\n    count: 4\n" in change.text
    assert "CHECK" not in change.text and "name: mine   # as Slurm calls it" in change.text
    write_profile(change)
    assert load_cluster(tmp_path / "mine.yaml").node.gpu is not None


def test_detect_uses_what_the_doctor_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    slurm = {"slurm": {"partition": "gpu"}, "scheduler": "slurm"}
    results = results_with(tmp_path, name="mine", login="della", **slurm)
    assert found_earlier(lambda cluster: cluster.login == "della") == facts_of(results)
    assert not found_earlier(lambda cluster: cluster.login == "tiger")
    text = with_facts(GUESSED, facts_of(results))
    assert "# launcher doctor, 2026-11-25, run doctor-1: all-reduce hangs without it" in text
    (tmp_path / "mine.yaml").write_text(text)
    assert load_cluster(tmp_path / "mine.yaml").network.env == {"NCCL_SHM_DISABLE": "1"}


def test_a_shipped_profile_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert (
        own_file(clusters_dir() / "local.yaml", clusters_dir()) == tmp_path / "launcher/clusters/local.yaml"
    )
    assert own_file(tmp_path / "mine.yaml", clusters_dir()) == tmp_path / "mine.yaml"


@pytest.mark.slow
def test_an_interface_that_leads_nowhere_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile names eth1, which joins no nodes. The search finds eth0, and writes it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/spaces.yaml").write_text(PROFILE)
    with Nodes(tmp_path) as nodes:
        nodes.network(1, joined=False)
        env = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
        results = nodes.doctor(cluster={"network": {"interface": "eth1"}}, env={0: env, 1: env})
    found = sick(results)
    assert found["interfaces"].verdict == "broken" and "eth1" in found["interfaces"].cause
    assert found["joined"].verdict == "broken"
    assert found["chosen"].measured == "GLOO_SOCKET_IFNAME=eth0"
    assert {one.check: one.verdict for one in results.findings if one.part == "model"} == {
        "model-alone": "good",
        "model-ddp": "good",
        "model-fsdp": "good",
    }
    change = changed_profile(results, "spaces")
    assert change is not None and "+    GLOO_SOCKET_IFNAME: eth0" in change.difference
    write_profile(change)
    written = tmp_path / "clusters/spaces.yaml"
    assert "interface: eth1   # as the data sheet says" in written.read_text()
    assert load_cluster(written).network.env == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert [file.name for file in (tmp_path / "clusters").iterdir()] == ["spaces.yaml"]


HANGS = PATCH.replace(
    "{fault}", "os.environ['GLOO_SOCKET_IFNAME'] == 'eth1':\n"
    "            os.kill(os.getpid(), signal.SIGSTOP)\n"
    "        result = original(tensor, *arguments, **more)"
)  # fmt: skip


@pytest.mark.slow
def test_a_setting_that_hangs_is_a_finding_and_the_search_goes_on(tmp_path: Path) -> None:
    """eth0 drops what gloo sends, a rank stops with eth1, eth2 joins no nodes, and eth3 works."""
    with Nodes(tmp_path) as nodes:
        nodes.network(1)
        nodes.network(2, joined=False)
        nodes.network(3)
        for node in range(2):
            nodes.on(node, "iptables -A INPUT -i eth0 -p tcp --dport 32768:60999 --syn -j DROP")
        results = nodes.doctor(env={1: faulty(tmp_path, HANGS)})
        assert [nodes.processes(node) for node in range(2)] == [[], []], "nothing is left"
    tried = {one.subject: one.value for one in results.values if one.check == "setting"}
    stopped = tried["GLOO_SOCKET_IFNAME=eth1"]
    assert (stopped["kind"], stopped["ranks"], stopped["state"]) == ("hang", (1,), "T")
    assert tried["GLOO_SOCKET_IFNAME=eth2"]["kind"] != "ok"
    assert sick(results)["chosen"].measured == "GLOO_SOCKET_IFNAME=eth3"
    assert {one.verdict for one in results.findings if one.part == "model"} == {"good"}
    assert not list(tmp_path.rglob(".doctor*"))


@pytest.mark.slow
def test_the_faster_of_two_networks_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is broken: eth0 reaches 400 Mb/s, and eth1 is not limited."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/spaces.yaml").write_text(PROFILE)
    with Nodes(tmp_path) as nodes:
        nodes.network(1)
        nodes.on(1, "tc qdisc add dev eth0 root tbf rate 400mbit burst 256kbit latency 400ms")
        results = nodes.doctor(tune=True)
    assert sick(results)["chosen"].measured == "GLOO_SOCKET_IFNAME=eth1"
    tried = {one.subject for one in results.values if one.check == "setting"}
    assert tried == {"GLOO_SOCKET_IFNAME=eth1", "none"}, "eth0 is in force"
    change = changed_profile(results, "spaces")
    assert change is not None and "+    GLOO_SOCKET_IFNAME: eth1" in change.difference
