"""How far the loss curves of recipes are from fp32 on one device, in 20 steps on real text.

The test suite runs any two values of a recipe together; this runs any three, on 1, 2 and 4 ranks over gloo,
and says what each precision and optimizer really costs beside the tolerance that the tests allow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.train.loss_curves import curves, distance  # noqa: E402
from tests.train.recipes import PLAIN, REFERENCE, covering, recipe, tolerance, valid  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--together", type=int, default=3, help="values that stand together once or more")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/recipes.json")
    options = parser.parse_args()
    reference = _reference()
    worst: dict[tuple[str, str], float] = {}
    failed, counts = [], {}
    for ranks in options.ranks:
        chosen = covering(ranks, options.together)
        counts[ranks] = {"valid": sum(1 for _ in valid(ranks)), "run": len(chosen)}
        print(f"{ranks} ranks: {counts[ranks]['run']} of {counts[ranks]['valid']} recipes", flush=True)
        started = time.perf_counter()
        for one, curve in zip(chosen, _in_parts(chosen, ranks), strict=True):
            kind = one["precision"], one["optimizer"]
            if isinstance(curve, str):
                failed.append({"ranks": ranks, "recipe": one, "error": curve})
                continue
            off = distance(curve, reference[REFERENCE[one["optimizer"]]])
            worst[kind] = max(worst.get(kind, 0.0), off)
            if not off <= tolerance(one):
                failed.append({"ranks": ranks, "recipe": one, "off": off, "allowed": tolerance(one)})
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    rows = [
        {"precision": p, "optimizer": o, "largest_difference": float(f"{off:.1e}"), "allowed": allowed}
        for (p, o), off in sorted(worst.items())
        for allowed in [tolerance({"precision": p, "optimizer": o})]
    ]
    for row in rows:
        print("{precision:11} {optimizer:11} {largest_difference:.1e} (allowed {allowed:.1e})".format(**row))
    print(f"{len(failed)} failed", *map(json.dumps, failed), sep="\n")
    if options.save:
        report = {
            "command": f"python benchmarks/recipes.py {' '.join(sys.argv[1:])}",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": _versions(),
            "recipes": counts,
            "failed": failed,
            "results": rows,
        }
        target = ROOT / "benchmarks" / "results" / "recipes.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


def _reference() -> dict[str, list[float]]:
    names = sorted(set(REFERENCE.values()))
    plain = [recipe(1, **PLAIN, optimizer=name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(names, curves(plain, Path(folder), 1), strict=True))


def _in_parts(chosen: list[dict[str, Any]], ranks: int) -> list[Any]:
    """Fifty recipes a process: what one leaves behind shall not weigh on the next."""
    done: list[Any] = []
    for start in itertools.count(step=50):
        if start >= len(chosen):
            return done
        with tempfile.TemporaryDirectory() as folder:
            done += curves(chosen[start : start + 50], Path(folder), ranks, timeout=3600)
    return done


def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    names = ("gpu-launcher", "torch", "bitsandbytes")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


if __name__ == "__main__":
    raise SystemExit(main())
