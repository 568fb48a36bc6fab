"""A run directory written by hand, for tests of what is read from one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.memory.estimate import Estimate, Peak
from launcher.report.run_report import Report, report_of
from launcher.rundir.files import append_json, read_record, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import stamp
from launcher.schedulers.rundir import status_of
from launcher.spec.cluster import Cluster, Node
from launcher.spec.job import Batch, Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import OutOfMemory, Verdict

BEGIN = 1_800_000_000.0


def recipe(micro: int) -> dict[str, Any]:
    return Recipe(
        precision="fp32", optimizer="adamw", sharding="fsdp", micro_batch_size=micro, grad_accum=16 // micro
    ).model_dump()


def to(micro: int, before: int) -> dict[str, Any]:
    return {
        "changes": {"micro_batch_size": [before, micro], "grad_accum": [16 // before, 16 // micro]},
        "reason": f"micro-batch {before} -> {micro}",
    }


class Log:
    """A run directory written by hand, with a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.run, self.clock = RunDir(path), BEGIN
        path.mkdir(parents=True)
        ladder = [recipe(8), recipe(4), recipe(2)]
        plan = {"recipe": recipe(16), "ladder": ladder, "ladder_speed": [0.97, 0.90, 0.45]}
        replace_json(self.run.plan, plan)

    def event(self, kind: str, after: float = 0.0, **fields: Any) -> None:
        self.clock += after
        append_json(self.run.events, {"time": stamp(self.clock), "event": kind, **fields})

    def steps(self, attempt: int, first: int, last: int, seconds: float, **more: Any) -> None:
        for step in range(first, last + 1):
            self.clock += seconds
            line = {"time": stamp(self.clock), "attempt": attempt, "step": step, "seconds": seconds, **more}
            append_json(self.run.metrics, line)

    def about(self, name: str = "gpt", **fields: Any) -> None:
        """run.json of a job on two GPUs of 80 GiB each."""
        gpu = {"type": "NVIDIA H100", "count": 2, "memory": 80 * GIB}
        job = Job(name=name, task="launcher.tasks.gpt:PydocGPT", batch=Batch(global_=16), **fields)
        cluster = Cluster(name="h100", scheduler="local", node=Node(gpu=gpu, cpus=32, memory=256 * GIB))
        record = {
            "id": self.run.id,
            "created": stamp(BEGIN),
            "job": job.model_dump(mode="json", by_alias=True),
            "cluster": cluster.model_dump(mode="json"),
            "nodes": 1,
            "gpus_per_node": 2,
            "ranks_per_node": 2,
            "versions": {"launcher": "0.1.0", "torch": "2.13.0"},
            "code": {"commit": "0123abc"},
        }
        replace_json(self.run.submitted, record)
        plan = read_record(self.run.plan)
        layout = {"nodes": 1, "ranks_per_node": 2, "gpus_per_node": 2}
        more = {"layout": layout, "usd_per_hour": 4.0, "estimate": ESTIMATE.model_dump()}
        replace_json(self.run.plan, {**plan, **more})

    def state(self, state: str, **fields: Any) -> None:
        replace_json(self.run.state, {"state": state, "time": stamp(self.clock), **fields})

    def memory(
        self, attempt: int, rank: int, begin: float, peaks: Sequence[int], seconds: float, first: int = 1
    ) -> None:
        """One line for each step, as a rank writes them."""
        path = self.run.attempt(attempt).memory(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            {
                "time": stamp(begin + number * seconds),
                "step": first + number - 1,
                "rss": GIB + rank * 2**28,
                "peak": peak,
            }
            for number, peak in enumerate(peaks, 1)
        )
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def log(self, attempt: int, rank: int, *lines: str) -> None:
        """Lines of standard output, stamped now."""
        path = self.run.attempt(attempt).rank_log(0, rank, "out")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.writelines(f"{stamp(self.clock)} {line}\n" for line in lines)

    def report(self) -> Report:
        status = status_of(self.run, "local", self.run.read_state())
        return report_of(self.run, status, self.clock)


PEAK = Peak(
    when="steady state",
    phase="backward",
    module="blocks.3",
    allocated=60 * GIB,
    parts={"parameters": 20 * GIB, "activations": 40 * GIB},
)
ESTIMATE = Estimate(
    peaks=(PEAK,), reserved=64 * GIB, overhead={"CUDA context": GIB}, host={}, band=0.05, basis="traced"
)


def eventful(path: Path, name: str = "gpt", line: str = "a line", lr: float = 1e-3) -> Log:
    """A run that ran out of memory at step 10 and went on from step 8 with half the micro-batch."""
    log = Log(path)
    log.about(name, steps=40, train={"lr": lr})
    log.event("submitted")
    for attempt, micro in enumerate((16, 8)):
        log.run.attempt(attempt).path.mkdir(parents=True)
        replace_json(log.run.attempt(attempt).recipe, recipe(micro))
    log.event("started", 30.0, host="node-1", pid=1, nodes=1)
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.event("probe", 12.0, attempt=0, micro_batch_size=16, planned=16, asked=1, seconds=2.0)
    begin = log.clock
    metrics = {"lr": 1e-3, "weight": 100.0, "tokens_per_second": 50.0, "mfu": 0.4}
    for step in range(1, 10):
        log.steps(0, step, step, 2.0, loss=5.0 - step / 10, **metrics)
    log.log(0, 1, line, "torch.OutOfMemoryError: CUDA out of memory")
    log.memory(0, 0, begin, [50 * GIB + step for step in range(9)], 2.0)
    log.memory(0, 1, begin, [51 * GIB + step for step in range(9)], 2.0)
    verdict = Verdict(
        failure="gpu-oom",
        reason="rank 1 ran out of memory in backward of step 10",
        rank=1,
        step=10,
        exception=f"OutOfMemoryError: {line}",
        last_lines=(line,),
        memory=OutOfMemory(kind="gpu", requested=GIB),
    )
    replace_json(log.run.attempt(0).verdict, {**verdict.model_dump(), "then": "micro-batch 16 -> 8"})
    log.event("ended", 0.5, attempt=0, failure="gpu-oom", reason=verdict.reason, action="retry-lower", rank=1)
    log.event("downgrade", in_process=False, step=10, rank=1, phase="backward", **to(8, 16))
    log.event("attempt", attempt=1, recipe=recipe(8))
    log.event("resumed", 5.0, step=8, **{"from": "checkpoint"})
    begin = log.clock
    for step in range(9, 41):
        held_out = {"eval_loss": 4.0 - step / 20} if step % 20 == 0 else {}
        log.steps(1, step, step, 2.5, loss=5.0 - step / 10, **metrics, **held_out)
    for rank in range(2):
        log.memory(1, rank, begin, [40 * GIB] * 32, 2.5, first=9)
    log.log(1, 0, line, "done")
    log.event("checkpoint", step=40, path=str(log.run.checkpoints / "step-00000040"))
    replace_json(
        log.run.attempt(1).verdict, {**Verdict(failure="succeeded", reason="done").model_dump(), "then": ""}
    )
    log.event("ended", 1.0, attempt=1, failure="succeeded", reason="every rank ended with exit code 0")
    log.event("finished", state="succeeded", failure="succeeded", reason="every rank ended with exit code 0")
    log.state("succeeded", failure="succeeded", reason="every rank ended with exit code 0")
    return log
