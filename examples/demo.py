"""`make demo`: train on two ranks, run out of memory once, recover. No account, no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHER = [sys.executable, "-m", "launcher"]


def main() -> int:
    title("1. Train a small GPT on Python's own documentation, two ranks on the CPU")
    first = run(HERE / "demo.yaml")
    losses = [line["eval_loss"] for line in metrics(first) if "eval_loss" in line]
    print(f"\nheld-out loss: {' -> '.join(f'{loss:.3f}' for loss in losses)} nats per byte")

    title("2. A larger one, with a memory budget that the first micro-batch does not fit into")
    second = run(HERE / "demo-oom.yaml")
    print()
    launcher("why", second.name)
    recipes = [json.loads(file.read_text()) for file in sorted(second.glob("attempts/*/recipe.json"))]
    for number, recipe in enumerate(recipes):
        size, accum = recipe["micro_batch_size"], recipe["grad_accum"]
        print(
            f"attempt {number}: micro-batch {size} x accumulation {accum} = {size * accum} samples per rank"
        )

    title("3. The same again, with the probe: each rank finds out before the first step")
    run(HERE / "demo-oom.yaml", "--set", "train.probe=auto")

    title("4. Where the files are")
    launcher("list", "--limit", "2")
    for path in sorted(second.rglob("*")):
        name = path.relative_to(second)
        if path.is_file() and name.parts[0] != "checkpoints" and "torchrun" not in name.parts:
            print(f"  {name}")
    print(f"\nin {second}")
    return 0 if losses[-1] < losses[0] - 0.3 and len(recipes) == 2 else 1


def run(job: Path, *options: str) -> Path:
    """Start a job, follow it to its end, return its directory."""
    words = " ".join(["launcher run", str(job.relative_to(HERE.parent)), "-c local", *options])
    print(f"$ {words}\n", flush=True)
    launcher("run", str(job), "-c", "local", *options)
    runs = json.loads(subprocess.check_output([*LAUNCHER, "list", "--json"]))
    return next(Path(run["path"]) for run in runs if run["name"] == job.stem)


def launcher(*arguments: str) -> None:
    sys.stdout.flush()
    code = subprocess.call([*LAUNCHER, *arguments])
    if code != 0 and arguments[0] == "run":
        sys.exit(code)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def title(text: str) -> None:
    print(f"\n{'=' * len(text)}\n{text}\n{'=' * len(text)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
