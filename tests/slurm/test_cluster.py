"""The test cluster is what the other tests take it for."""

from __future__ import annotations

from tests.slurm.lab import SlurmLab


def test_nodes_have_names_and_addresses_of_their_own_and_reach_each_other(slurm_lab: SlurmLab) -> None:
    script = 'echo "$(hostname) $(getent hosts n2 | cut -d" " -f1)"; exec 3<>"/dev/tcp/n3/$1"'
    shape = slurm_lab.cluster.shape
    port = str(shape.port + 10 + 2)  # of the slurmd on n3
    said = slurm_lab.slurm("srun", "-N", "4", "bash", "-c", script, "bash", port).splitlines()
    assert sorted(said) == [f"n{i} 10.{shape.octet}.0.2" for i in (1, 2, 3, 4)]


def test_gpus_can_be_asked_for(slurm_lab: SlurmLab) -> None:
    command = ["srun", "-N", "1", "--gpus-per-node=2", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert slurm_lab.slurm(*command) == "0,1"


def test_accounting_knows_how_a_job_ended(slurm_lab: SlurmLab) -> None:
    job = slurm_lab.sbatch("exit 3")
    assert slurm_lab.accounted(job, "ExitCode") == [["FAILED", "3:0"]]
