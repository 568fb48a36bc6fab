"""The doctor on a GPU: NVML's values, a matrix product and NCCL on one device."""

from __future__ import annotations

import pytest

from launcher.doctor.checks import CHECKS
from launcher.doctor.examine import examine
from launcher.doctor.measure.gpus import measure_gpus
from launcher.doctor.measure.group import Group
from launcher.doctor.outcome import BUS, outcome
from launcher.doctor.rank_test import RankTest
from launcher.doctor.values import Expected
from launcher.supervise.ports import free_port

pytestmark = pytest.mark.gpu


def test_nvml_tells_of_every_gpu() -> None:
    import torch

    values = list(measure_gpus(0))
    assert {value.check for value in values} <= set(CHECKS)
    assert not [value for value in values if value.error]
    names = {value.subject: value.value for value in values if value.check == "gpu-name"}
    assert torch.cuda.get_device_name(0) in names.values()
    expected = Expected(gpus_per_node=1, gpu_type=torch.cuda.get_device_name(0))
    verdicts = {one.check: one.verdict for one in examine(values, expected)}
    assert verdicts["gpus"] == verdicts["driver"] == "good"


def test_a_matrix_product_and_nccl_give_right_values() -> None:
    with Group() as group:
        product = RankTest("compute", {"gpus": True}, (0,), "127.0.0.1", free_port(), 60.0)
        [told] = group.run([product], {0: 0})
        end = outcome(product, told)
        assert end.ok and end.each[0]["flops"] > 1e12 and end.each[0]["bytes_per_second"] > 1e10
        for name in BUS:
            if name == "point-to-point":  # a rank cannot send to itself
                continue
            options = {"gpus": True, "name": name, "sizes": [8, 2**20]}
            test = RankTest("collective", options, (0,), "127.0.0.1", free_port(), 60.0)
            [told] = group.run([test], {0: 0})
            assert outcome(test, told).ok, (name, told)
