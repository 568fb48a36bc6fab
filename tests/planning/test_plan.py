from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.planning.micro_batches import ladder
from launcher.planning.oom_fallback import lower
from launcher.planning.plan import PlanRefusedError, make_plan
from launcher.spec.cluster import Cluster
from launcher.spec.fire_drill import BUDGET, DRILLS
from launcher.spec.job import Job
from launcher.spec.recipe import APPROXIMATE, Recipe
from launcher.spec.recipe_rules import Setting
from launcher.spec.verdict import Verdict

GPU = {"type": "NVIDIA RTX A6000", "count": 8, "memory": "47.4GiB"}
A6000 = Cluster.model_validate(
    {"name": "a6000", "scheduler": "local", "node": {"gpu": GPU, "memory": "512GiB"}}
)
LAPTOP = Cluster(name="laptop", scheduler="local")


def job(**fields: Any) -> Job:
    return Job.model_validate({"name": "j", "task": "a:B", "steps": 5, "batch": {"global": 64}, **fields})


def refusal(job: Job, cluster: Cluster) -> str:
    with pytest.raises(PlanRefusedError) as caught:
        make_plan(job, cluster)
    return str(caught.value)


def test_one_rank_drives_each_gpu_and_the_global_batch_is_exact():
    plan = make_plan(job(), A6000)
    assert (plan.layout.ranks, plan.recipe.micro_batch_size, plan.recipe.grad_accum) == (8, 8, 1)
    assert (plan.recipe.precision, plan.recipe.sharding) == ("bf16-mixed", "fsdp")


def test_without_gpus_one_rank_trains_in_fp32():
    plan = make_plan(job(), LAPTOP)
    assert (plan.layout.ranks, plan.recipe.precision, plan.recipe.sharding) == (1, "fp32", "none")


def test_the_global_batch_is_that_of_the_ranks_that_train_on_different_samples():
    asked = job(command=None, task="tasks.py:Task", recipe={"pipeline": 4, "grad_accum": 4})
    plan = make_plan(asked, A6000)
    assert (plan.recipe.micro_batch_size, plan.recipe.grad_accum) == (8, 4), "64 = 8 x 4 x 2"
    assert "64 / 2 data-parallel ranks / accumulation 4" in plan.reason
    asked = job(command=None, task="tasks.py:Task", recipe={"tensor": 3})
    assert "must divide the number of ranks" in refusal(asked, A6000)
    asked = job(command=None, task="tasks.py:Task", recipe={"tensor": 2, "micro_batch_size": 3})
    assert "3 does not divide the 16 samples that each of 4 data-parallel ranks gets" in refusal(asked, A6000)


@pytest.mark.parametrize(("batch", "sizes"), [(64, (8, 4)), (96, (12, 4))])
def test_interleaved_stages_start_with_a_micro_batch_for_each_rank_of_the_pipeline(batch, sizes):
    fixed = {"pipeline": 4, "virtual_stages": 2}
    plan = make_plan(job(batch={"global": batch}, recipe=fixed), A6000)
    assert (plan.recipe.micro_batch_size, plan.recipe.grad_accum) == sizes
    odd = job(batch={"global": 12}, recipe=fixed)
    assert "grad_accum must be a multiple of pipeline" in refusal(odd, A6000), "6 samples"


def test_what_the_job_fixes_is_kept_and_the_rest_follows():
    plan = make_plan(job(recipe={"micro_batch_size": 2}), A6000)
    assert (plan.recipe.micro_batch_size, plan.recipe.grad_accum) == (2, 4)
    assert [(rung.micro_batch_size, rung.offload) for rung in plan.ladder] == [(1, "none"), (1, "cpu")]
    plan = make_plan(job(recipe={"micro_batch_size": 2, "offload": "none"}), A6000)
    assert [(rung.micro_batch_size, rung.offload) for rung in plan.ladder] == [(1, "none")]


def test_below_the_smallest_micro_batch_is_the_hosts_memory_where_there_is_one_beside_the_devices():
    def below(cluster, **fields):
        return [rung.offload for rung in make_plan(job(**fields), cluster).ladder][-1]

    ddp = {"sharding": "ddp"}
    assert (below(A6000), below(A6000, recipe=ddp)) == ("cpu", "cpu-optimizer")
    assert below(LAPTOP) == "none" and below(LAPTOP, env={"TRAIN_MEMORY_BUDGET": "1GiB"}) == "cpu-optimizer"
    assert below(A6000, task=None, command="python train.py") == "none"


@pytest.mark.parametrize(
    ("fields", "cluster", "message"),
    [
        ({"resources": {"gpus_per_node": 9}}, A6000, "9 GPUs asked for, a node of a6000 has 8"),
        ({"resources": {"gpus_per_node": 1}}, LAPTOP, "0 trains on the CPU"),
        ({"resources": {"nodes": 2}}, A6000, "2 nodes asked for, a6000 gives 1"),
        ({"resources": {"memory_per_node": "1TiB"}}, A6000, "1024 GiB asked for, a node has 512 GiB"),
        ({"resources": {"gpus_per_node": 4, "ranks_per_node": 2}}, A6000, "one rank drives one GPU"),
        ({"batch": {"global": 60}}, A6000, "nearest: 56 or 64"),
        (
            {"recipe": {"micro_batch_size": 3}},
            A6000,
            "3 does not divide the 8 samples that each of 8 ranks gets",
        ),
        (
            {"task": None, "command": "python t.py", "recipe": {"optimizer": "adamw-8bit"}},
            A6000,
            "bitsandbytes-no",
        ),
        ({"recipe": {"offload": "nvme-optimizer"}}, A6000, "set train.nvme_dir"),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_the_reason(fields, cluster, message):
    assert message in refusal(job(**fields), cluster)


@pytest.mark.parametrize(
    "recipe",
    [
        *(
            {"activations": policy}
            for policy in ("keep", "selective", "every-second", "checkpoint", "offload", "compress")
        ),
        {"loss_chunks": 8},
        {"compile": True, "activations": "selective"},
        {"sharding": "hybrid"},
        {"precision": "fp16-mixed"},
        {"precision": "float8", "compile": True},
        {"sharding": "hybrid", "optimizer": "adamw-8bit", "offload": "cpu"},
        {"activations": "checkpoint", "checkpoint_ratio": 0.5},
        {"grad_sync": "last"},
    ],
)
def test_what_the_entrypoint_runs_is_planned(recipe):
    several = A6000.model_copy(update={"max_nodes": 2})
    plan = make_plan(job(recipe=recipe, resources={"nodes": 2}), several)
    assert recipe.items() <= plan.recipe.model_dump().items()


@pytest.mark.parametrize(("sharding", "grad_sync"), [("ddp", "last"), ("fsdp", "each"), ("hybrid", "each")])
def test_gradients_meet_last_where_that_is_one_copy_of_them(sharding, grad_sync):
    several = A6000.model_copy(update={"max_nodes": 2})
    plan = make_plan(job(recipe={"sharding": sharding}, resources={"nodes": 2}), several)
    assert plan.recipe.grad_sync == grad_sync


def test_a_ratio_asks_for_checkpointing_and_a_directory_allows_states_on_nvme():
    assert make_plan(job(recipe={"checkpoint_ratio": 0.5}), A6000).recipe.activations == "checkpoint"
    asked = job(recipe={"offload": "nvme-optimizer"}, train={"nvme_dir": "/local"})
    assert make_plan(asked, A6000).recipe.offload == "nvme-optimizer"


def test_what_costs_more_than_it_brings_is_planned_with_a_warning():
    asked = {"sharding": "fsdp", "offload": "cpu", "activations": "offload"}
    warnings = make_plan(job(recipe=asked), LAPTOP).warnings
    assert [warning.split(" frees")[0] for warning in warnings] == ["offload: cpu", "activations: offload"]
    assert "without compile: true" in make_plan(job(recipe={"precision": "float8"}), A6000).warnings[0]


def test_approximate_gradients_are_told_once_and_the_policy_stays_on_every_rung():
    plan = make_plan(job(recipe={"activations": "compress"}), A6000)
    assert plan.warnings.count(APPROXIMATE) == 1
    assert len(plan.ladder) > 1 and {rung.activations for rung in plan.ladder} == {"compress"}
    assert APPROXIMATE not in make_plan(job(recipe={"activations": "keep"}), A6000).warnings


@pytest.mark.parametrize("activations", ["offload", "compress"])
def test_compile_with_activations_that_hooks_see_is_refused_with_what_runs(activations):
    text = refusal(job(recipe={"compile": True, "activations": activations}), A6000)
    assert "activations: checkpoint runs with it" in text


@pytest.mark.parametrize("variable", [BUDGET, DRILLS])
def test_compile_is_refused_where_allocations_are_counted(variable):
    value = {BUDGET: "4GiB", DRILLS: "phase=backward"}[variable]
    on_cpu, on_gpu = (
        job(recipe={"compile": True, "activations": "budget"}, env={variable: value}, resources=resources)
        for resources in ({"gpus_per_node": 0}, {})
    )
    assert "nearest valid: compile: false, activations: checkpoint" in refusal(on_cpu, LAPTOP)
    if variable == DRILLS:
        assert "compile-no-counting" in refusal(on_gpu, A6000)
    else:
        make_plan(on_gpu, A6000)  # PyTorch's own allocator counts there


def test_a_drill_of_a_rank_that_the_cluster_does_not_have_is_refused():
    message = refusal(job(env={"TRAIN_MEMORY_FAIL": "phase=forward,rank=8"}), A6000)
    assert "env.TRAIN_MEMORY_FAIL: rank '8' is not one of the 8" in message
    assert make_plan(job(env={"TRAIN_MEMORY_FAIL": "phase=forward,rank=7"}), A6000)
    theirs = {"task": None, "command": "python train.py", "env": {"TRAIN_MEMORY_BUDGET": "abc"}}
    assert make_plan(job(**theirs), LAPTOP), "of a command it is the command's own"


def test_every_reason_is_given_at_once():
    text = refusal(job(resources={"nodes": 3, "gpus_per_node": 16}, batch={"global": 7}), A6000)
    assert len(text.splitlines()) == 3


def test_a_foreign_command_may_use_any_recipe_and_is_warned_when_it_cannot_be_lowered():
    foreign = Job.model_validate({"name": "j", "command": "python t.py", "batch": {"global": 64}})
    plan = make_plan(foreign, A6000)
    assert any("{micro_batch_size}" in warning for warning in plan.warnings)


def test_an_8_bit_optimizer_on_shards_is_planned_for_a_task():
    plan = make_plan(job(recipe={"optimizer": "adamw-8bit"}), A6000)
    assert (plan.recipe.optimizer, plan.recipe.sharding) == ("adamw-8bit", "fsdp")


BASE = Recipe(precision="fp32", optimizer="adamw", sharding="none", micro_batch_size=1, grad_accum=1)


@given(st.integers(1, 400), st.integers(1, 40))
def test_every_rung_keeps_the_batch_and_shrinks_the_micro_batch(micro, accum):
    recipe = BASE.model_copy(update={"micro_batch_size": micro, "grad_accum": accum})
    sizes = [micro]
    for rung in ladder(recipe, Setting(1, 1, 1)):
        assert rung.micro_batch_size * rung.grad_accum == micro * accum
        assert rung.micro_batch_size <= sizes[-1] // 2
        sizes.append(rung.micro_batch_size)
    assert sizes[-1] == 1


def test_the_ladder_shards_the_gradients_before_it_makes_more_of_them():
    asked = BASE.model_copy(update={"sharding": "fsdp", "grad_sync": "last", "micro_batch_size": 4})
    setting = Setting(2, 1, 2, entrypoint=True)
    sizes = [(rung.micro_batch_size, rung.grad_sync) for rung in ladder(asked, setting)]
    assert sizes == [(2, "each"), (1, "each")]
    asked = asked.model_copy(update={"grad_accum": 2})
    assert [rung.micro_batch_size for rung in ladder(asked, setting)] == [4, 2, 1]
    of_ddp = [
        (rung.micro_batch_size, rung.grad_sync)
        for rung in ladder(asked.model_copy(update={"sharding": "ddp"}), setting)
    ]
    assert of_ddp == [(2, "last"), (1, "last"), (1, "each")]
    rung = lower(asked, Verdict(failure="gpu-oom", reason="", phase="backward"), setting)
    assert rung.recipe is not None and rung.recipe.grad_sync == "each" and "last -> each" in rung.reason


def test_batch_norm_keeps_two_samples():
    recipe = BASE.model_copy(update={"micro_batch_size": 8})
    sizes = [rung.micro_batch_size for rung in ladder(recipe, Setting(1, 1, 1, batch_norm=True))]
    assert sizes == [4, 2]


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict(failure="gpu-oom", reason="", phase="optimizer"), "optimizer step"),
        (Verdict(failure="host-oom", reason=""), "host memory"),
        (Verdict(failure="gpu-oom", reason="", phase="forward"), "the least here is 1"),
    ],
)
def test_a_rung_that_would_not_help_is_not_taken(verdict, reason):
    rung = lower(BASE, verdict, Setting(8, 1, 8))
    assert rung.recipe is None and reason in rung.reason


def test_a_command_without_the_micro_batch_is_told_how_a_smaller_one_reaches_it():
    (told, _) = make_plan(job(task=None, steps=None, command="python train.py"), LAPTOP).warnings
    assert "{micro_batch_size}" in told and "LAUNCHER_MICRO_BATCH_SIZE" in told and "ends the run" not in told
    (other,) = make_plan(
        job(task=None, steps=None, command="python t.py {micro_batch_size} {grad_accum}"), LAPTOP
    ).warnings
    assert "{checkpoint_dir}" in other


def test_what_only_a_shell_would_expand_is_told():
    given = "{micro_batch_size} {grad_accum} {checkpoint_dir}"
    command = f"python t.py {given} --data $SCRATCH/x ~/out ${{HOME}} --price 5$ a~b"
    (told,) = make_plan(job(task=None, steps=None, command=command), LAPTOP).warnings
    assert "gets $SCRATCH/x, ~/out, ${HOME} as written" in told
    in_shell = ["bash", "-c", f"python t.py {given} $HOME"]
    for own in (in_shell, ["sh", "-c", "$PROGRAM{micro_batch_size}{grad_accum}{checkpoint_dir}"]):
        assert make_plan(job(task=None, steps=None, command=own), LAPTOP).warnings == ()


def test_a_name_in_braces_that_is_no_placeholder_is_told():
    given = "{micro_batch_size} {grad_accum} {checkpoint_dir}"
    command = f"""python t.py {given} --seed={{seed}} --out {{seed}}-{{{{epoch}}}} '{{"a": 1}}' x{{A}}"""
    (told,) = make_plan(job(task=None, steps=None, command=command), LAPTOP).warnings
    assert "gets {seed} as written" in told and "write {{seed}}" in told


def test_a_placeholder_without_a_value_is_told():
    command = "python t.py {micro_batch_size} {grad_accum} {checkpoint_dir} --steps={steps} {{epochs}}"
    (told,) = make_plan(job(task=None, steps=None, command=command), LAPTOP).warnings
    assert told == "the job does not set {steps}: the command gets nothing there"
    assert make_plan(job(task=None, steps=2, command=command), LAPTOP).warnings == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train": {"lr": 1e-3, "seed": 3}}, "nothing reads train.lr, train.seed: with `command:`"),
        ({"recipe": {"compile": True}}, "nothing reads recipe.compile: with `command:`"),
        ({"recipe": {"compile": True}, "plan": {"params": 10}}, ""),
        ({"steps": 10}, "no placeholder for steps: the value is only in the environment, as $LAUNCHER_STEPS"),
        ({"recipe": {"sharding": "fsdp"}}, "recipe.sharding: the value is only in the environment, as $LAUN"),
        ({"steps": 10, "command": "train {steps} {micro_batch_size} {grad_accum} {checkpoint_dir}"}, ""),
        ({"recipe": {"expandable_segments": True}, "tags": ["a"], "train": {"seed": 0}}, ""),
        ({"env": {"A": "1"}, "recipe": {"micro_batch_size": 2}}, ""),
    ],
)  # fmt: skip
def test_fields_that_nothing_reads_in_a_job_with_a_command_are_named(
    fields: dict[str, Any], said: str
) -> None:
    base = {"command": "train {micro_batch_size} {grad_accum} {checkpoint_dir}", "batch": {"global": 8}}
    job = Job.model_validate({"name": "x", **base, "resources": {"gpus_per_node": 0}, **fields})
    text = " ".join(make_plan(job, Cluster(name="here", scheduler="local")).warnings)
    assert said in text and bool(said) == ("only in the environment" in text or "nothing reads" in text)
    again = Job.model_validate(job.model_dump(by_alias=True))  # as a run keeps it: every field is set
    assert again.unread() == job.unread()
