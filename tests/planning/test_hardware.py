from __future__ import annotations

import pytest

from launcher.memory.states import Ranks
from launcher.planning.hardware import GPU_TYPES, gpu_type_of, gpu_types_of, hardware_of
from launcher.render.shipped import clusters_dir
from launcher.spec.cluster import Cluster, Network
from launcher.spec.load import load_cluster

GPU = {"type": "NVIDIA RTX A6000", "count": 8, "memory": "47.4GiB"}


def cluster(**fields: object) -> Cluster:
    return Cluster.model_validate({"name": "c", "scheduler": "local", "node": {"gpu": GPU}, **fields})


@pytest.mark.parametrize("gpu", GPU_TYPES, ids=lambda gpu: gpu.label)
def test_every_gpu_is_found_by_what_people_call_it_and_is_faster_in_fewer_bits(gpu):
    assert gpu_type_of(gpu.label) is gpu
    assert gpu_type_of(f"NVIDIA {gpu.label}") is gpu
    rates = [rate for rate in (gpu.fp32, gpu.half, gpu.float8) if rate is not None]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("device", "label"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(device, label):
    gpu = gpu_type_of(device)
    assert gpu is not None and gpu.label == label


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("A6000", "RTX A6000"),
        ("rtx4090", "RTX 4090"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("GeForce RTX 5090", "RTX 5090"),
        ("L40S 48GB", "L40S"),
        ("A100 80 GB", "A100 80GB"),
        ("A100 SXM4 80GB", "A100 80GB"),
        ("nvidia_a100-sxm4-80gb", "A100 80GB"),
        ("A100 PCIe 80GB", "A100 80GB PCIe"),
        ("V100 SXM2 32GB", "V100 32GB"),
        ("H100 SXM5", "H100"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("A100", "A100 80GB, A100 40GB, A100 80GB PCIe, A100 40GB PCIe"),
        ("A100 SXM", "A100 80GB, A100 40GB"),
    ],
)
def test_other_spellings_are_read_and_several_meanings_are_not_decided(name, labels):
    found = gpu_types_of(name)
    assert ", ".join(gpu.label for gpu in found) == labels
    assert gpu_type_of(name) == (found[0] if len(found) == 1 else None)


def test_the_memory_of_the_profile_tells_gpus_of_one_name_apart():
    gpu = {"type": "A100 SXM", "count": 4, "memory": "79.1GiB"}
    found = hardware_of(cluster(node={"gpu": gpu}), Ranks(4, 4, on_gpu=True))
    assert found is not None and found.gpu.label == "A100 80GB"


def test_parts_of_a_gpu_and_other_gpus_are_not_guessed():
    for name in (
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300X",
        "A100 MIG 3g.20gb",
        "RTX 4090 Laptop GPU",
        "RTX 4080 Super",
        "RTX 3080 16GB",
        "RTX 6000",
        "A10G",
        "24GB",
        "",
    ):
        assert gpu_types_of(name) == []


@pytest.mark.parametrize("profile", sorted(clusters_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_the_gpu_of_every_shipped_profile_is_known(profile):
    gpu = load_cluster(profile).node.gpu
    assert gpu is None or gpu_type_of(gpu.type) is not None


def test_volta_has_fast_products_in_fp16_alone():
    gpu = gpu_type_of("V100 32GB")
    assert gpu is not None
    assert gpu.flops("fp16-mixed") == 125e12 and gpu.flops("bf16-mixed") == gpu.flops("fp32") == 15.7e12
    assert gpu.flops("float8") is None


@pytest.mark.parametrize(("text", "rate"), [("400Gb/s", 50e9), ("3.2 Tbit/s", 400e9), ("50GB/s", 50e9)])
def test_the_rate_of_a_network_is_in_bits_or_bytes(text, rate):
    assert Network.model_validate({"inter_node": text}).inter_node == rate


def test_a_rate_without_its_unit_is_explained():
    with pytest.raises(ValueError, match="400Gb/s"):
        Network.model_validate({"inter_node": "fast"})


def test_what_the_profile_does_not_say_is_assumed_aloud():
    two_nodes = Ranks(16, 8, on_gpu=True)
    silent = hardware_of(cluster(), two_nodes)
    told = hardware_of(cluster(network={"inter_node": "200Gb/s"}), two_nodes)
    assert silent is not None and told is not None
    assert silent.inter_node == 12.5e9 and "inter_node" in silent.assumed[0]
    assert told.inter_node == 25e9 and told.assumed == ()


def test_the_threads_of_a_rank_are_those_that_its_start_leaves_it():
    node = {"gpu": GPU, "cpus": 64}
    assert [
        made.threads
        for ranks, env in [((1, 1), {}), ((8, 8), {}), ((8, 8), {"OMP_NUM_THREADS": "8"})]
        if (made := hardware_of(cluster(node=node), Ranks(*ranks, on_gpu=True), env)) is not None
    ] == [64, 1, 8]


def test_nothing_is_known_of_the_speed_of_a_cpu():
    assert hardware_of(cluster(), Ranks(1, 1, on_gpu=False)) is None
