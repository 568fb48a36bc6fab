"""What a day on a GPU has shown: predicted and measured values, and what differs by more than the band.

`--save` writes benchmarks/results/gpu_day.md, `--save-band` the errors of the memory estimate, from which
its band follows. Times of a `shared` row do not count: other cases ran on the GPU beside it. `--collect
FOLDER` first takes over results that a command wrote elsewhere. `--predict-again` takes the predictions of
today's gpu_day.jsonl in place of those of the day, to judge a corrected estimate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from gpu_day_case import FILE, STAGES, Case, read  # noqa: E402
from memory_tables import filled, markdown  # noqa: E402

from launcher.memory import accuracy  # noqa: E402
from launcher.planning import speed  # noqa: E402
from launcher.planning.hardware import GIGA, GpuType, gpu_type_of  # noqa: E402
from launcher.rundir.files import append_json, read_json_lines  # noqa: E402
from launcher.spec.quantities import GIB  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SPEED_BAND = 0.2
"Relative. Published throughputs are met within it: docs/speed.md."
BYTES = ("allocated", "reserved", "outside_allocator")
RATES = {
    "to_device": "PCIE_REACHED",
    "to_host": "PCIE_REACHED",
    "device_copy": "MEMORY_REACHED",
    "host_copy": "HOST_BANDWIDTH",
    "disk_write": "NVME",
    "disk_read": "NVME",
}
"Measured rate -> the constant of launcher/planning/speed.py that it is about."

Row = dict[str, Any]


class Comparison(NamedTuple):
    """One predicted value beside the measured one."""

    name: str
    predicted: float
    measured: float
    allowed: float

    @property
    def difference(self) -> float:
        """predicted / measured - 1; the measured value itself where 0 is predicted."""
        if isinstance(self.predicted, bool):
            return float(self.predicted != self.measured)
        if not self.predicted or not self.measured:
            return float(self.measured - self.predicted)
        return self.predicted / self.measured - 1

    @property
    def differs(self) -> bool:
        return not abs(self.difference) <= self.allowed

    def __str__(self) -> str:
        if isinstance(self.predicted, bool):
            return f"said {self.predicted}, was {self.measured}"
        unit = GIB if self.name.startswith(BYTES) else 1
        off = f" ({self.difference:+.1%})" if self.predicted else ""
        return f"{self.predicted / unit:.4g}, measured {self.measured / unit:.4g}{off}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="take over the results of this folder")
    parser.add_argument("--predict-again", action="store_true", help="use the predictions of gpu_day.jsonl")
    parser.add_argument("--save", action="store_true", help="write gpu_day.md")
    parser.add_argument("--save-band", action="store_true", help="write the errors of the memory estimate")
    options = parser.parse_args()
    if options.collect:
        print(f"{collect(options.collect, options.results)} new results")
    rows = newest(options.results)
    if options.predict_again:
        rows = predicted_again(rows, list(read(FILE)))
    text = report(rows)
    print(text)
    if options.save:
        (options.results / "gpu_day.md").write_text(f"# A day on a GPU\n\n{text}\n")
    if options.save_band and (errors := memory_errors(rows)):
        accuracy.save("launcher", errors)
    return 0


def collect(source: Path, target: Path) -> int:
    """Append the results in `source` that `target` lacks. Return their number."""
    number = 0
    for stage in STAGES:
        name = f"gpu-day-{stage}.jsonl"
        known = read_json_lines(target / name)
        new = [row for row in read_json_lines(source / name) if row not in known]
        for row in new:
            append_json(target / name, row)
        number += len(new)
    return number


def newest(folder: Path) -> list[Row]:
    """The last result of each case on each GPU, in the order of the stages."""
    found: dict[tuple[str, int, str], Row] = {}
    for stage in STAGES:
        for row in read_json_lines(folder / f"gpu-day-{stage}.jsonl"):
            found[row["device"], stage, row["case"]] = row
    return list(found.values())


def predicted_again(rows: Sequence[Row], cases: Sequence[Case]) -> list[Row]:
    """Replace the predictions of rows that ask what a case asks. Other rows are left out."""
    now = {case.name: case for case in cases}
    same = [row for row in rows if row["case"] in now and now[row["case"]].asked == row["asked"]]
    return [{**row, "predicted": now[row["case"]].predicted} for row in same]


def report(rows: Sequence[Row]) -> str:
    parts = []
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        parts += [f"## {device}", *_of_device(own, gpu_type_of(device))]
    return "\n\n".join(parts) if parts else "no results"


def _of_device(rows: Sequence[Row], gpu: GpuType | None) -> Iterator[str]:
    versions = {name: sorted({str(row[name]) for row in rows}) for name in ("torch", "python", "code")}
    yield "; ".join(f"{name} {', '.join(values)}" for name, values in versions.items())
    far = [
        {
            "stage": row["stage"],
            "case": row["case"],
            "what": f"{one.name}: {one}",
            "allowed": f"{one.allowed:.2g}",
        }
        for row in rows
        for one in compared(row, gpu)
        if one.differs
    ]
    ended = [row for row in rows if row["status"] != "measured"]
    yield f"Differs by more than the band: {len(far)} values."
    if far:
        yield markdown(far)
    if ended:
        yield "Not measured:"
        yield markdown([{"case": one["case"], "status": one["status"], "why": _why(one)} for one in ended])
    for stage, about in STAGES.items():
        own = [row for row in rows if row["stage"] == stage and row["status"] == "measured"]
        if own:
            yield f"### {stage}. {about.title}"
            yield markdown(filled([_told(row, own, gpu) for row in own]))
    if gpu is not None:
        yield "### Constants of the planner"
        yield markdown(filled([*constants(rows, gpu), *of_rates(rows, gpu)]))


def _why(row: Row) -> str:
    said = row["measured"].get("absent") or row.get("output", "").strip().rpartition("\n")[2]
    return said[-200:].replace("|", "/")


def _told(row: Row, rows: Sequence[Row], gpu: GpuType | None) -> dict[str, str]:
    """One line of a stage's table: compared values as "predicted, measured", then what else was measured."""
    columns = {"case": row["case"]}
    beside = {one.name: one for one in compared(row, gpu)}
    for name, value in {**row["measured"], **_ratio(row, rows)}.items():
        if row.get("shared") and name.endswith("seconds"):
            continue
        if name in beside:
            columns[name] = str(beside[name])
        elif isinstance(value, int | float):
            columns[name] = f"{value / GIB:.4g}" if name in BYTES else f"{value:.4g}"
        elif isinstance(value, str):
            columns[name] = value
    return columns


def _ratio(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Return launcher's speed / a peer's, if launcher trained the same model with the same recipe."""
    asked = row["asked"]
    if row["work"] != "speed" or asked["loop"] == "launcher":
        return {}
    for ours in rows:
        if ours["work"] != "speed" or ours["asked"]["loop"] != "launcher":
            continue
        model = ours["asked"]["model"]
        same = {name: model["recipe"].get(name) for name in asked["model"]["recipe"]}
        if model["name"] == asked["model"]["name"] and same == asked["model"]["recipe"]:
            speeds = (one["measured"]["tokens_per_second"] for one in (ours, row))
            return {"launcher / peer": next(speeds) / next(speeds)}
    return {}


def compared(row: Row, gpu: GpuType | None) -> Iterator[Comparison]:
    """Everything that was predicted and measured: values, and the peaks of phases."""
    said, was = row["predicted"], row["measured"]
    here = said.get("on", {}).get(gpu.label, {}) if gpu is not None else {}
    band = said.get("band", 0.0)
    ran_out = was.get("fits") is False  # how much it would have taken is not known
    for name, value in {**said, **({} if row.get("shared") else here)}.items():
        if ran_out and name in BYTES:
            continue
        if isinstance(value, int | float) and isinstance(was.get(name), int | float):
            yield Comparison(name, value, was[name], SPEED_BAND if name in here else band)
    for moment, phases in said.get("phases", {}).items() if was.get("fits") else ():
        for phase, size in phases.items():
            if phase == "optimizer" and row["asked"]["recipe"]["optimizer_step"] == "backward":
                continue  # the run counts its backward pass as a part of the update
            if phase in was["phases"].get(moment, {}):
                yield Comparison(f"allocated, {moment}, {phase}", size, was["phases"][moment][phase], band)


def memory_errors(rows: Sequence[Row]) -> dict[str, float]:
    """Return estimate / measured - 1 of the allocator's peak, for each run that did not run out of memory."""
    return {
        f"{row['case']}, {row['device']}": row["predicted"]["reserved"] / row["measured"]["reserved"] - 1
        for row in rows
        if row["work"] == "step" and row["status"] == "measured" and "reserved" in row["predicted"]
        if row["measured"]["fits"]
    }


def constants(rows: Sequence[Row], gpu: GpuType) -> Iterator[dict[str, str]]:
    """Fit the shares that kernels reach to the measured steps, by least squares of relative errors.

    A step is a x compute + b x memory + the rest as predicted; a has another value for float8, and b for
    compiled steps.
    """
    steps = [row for row in rows if row["status"] == "measured" and _parts(row, gpu) is not None]
    if not steps:
        return
    lines, seconds = [], []
    for row in steps:
        parts, recipe = _parts(row, gpu), _recipe(row)
        assert parts is not None
        eight, compiled = recipe["precision"] == "float8", recipe["compile"]
        took = row["measured"]["step_seconds"]
        compute, memory = parts["compute"], parts["memory"]
        rest = parts["exposed"] + parts["offload"] + parts["optimizer"]
        lines.append([compute * (not eight), compute * eight, memory * (not compiled), memory * compiled])
        lines[-1] = [one / took for one in lines[-1]]
        seconds.append(1 - rest / took)
    matrix = np.array(lines)
    known = matrix.any(axis=0)
    if len(steps) < known.sum():
        return
    fitted = np.ones(4)
    fitted[known] = np.linalg.lstsq(matrix[:, known], np.array(seconds), rcond=None)[0]
    off = float(np.median(np.abs(matrix @ fitted - np.array(seconds))))
    plain, eight, eager, compiled = fitted
    for name, now, fit, used in (
        (_reached(gpu), speed.reached(gpu), speed.reached(gpu) / plain, known[0]),
        ("FLOAT8_GAIN", speed.FLOAT8_GAIN, speed.FLOAT8_GAIN * plain / eight, known[0] and known[1]),
        ("MEMORY_REACHED", speed.MEMORY_REACHED, speed.MEMORY_REACHED / eager, known[2]),
        ("COMPILED", speed.COMPILED, speed.COMPILED * compiled / eager, known[2] and known[3]),
    ):
        if used:
            yield {"constant": name, "now": f"{now:.3g}", "measured": f"{fit:.3g}",
                   "from": f"{len(steps)} steps, {off:.1%} off in the median"}  # fmt: skip


def _reached(gpu: GpuType) -> str:
    key = gpu.label if gpu.label in speed.REACHED else gpu.architecture
    return f"REACHED[{key!r}]"


def _parts(row: Row, gpu: GpuType) -> dict[str, float] | None:
    """Return the predicted parts of a step whose time was measured and that offloads nothing."""
    here = row["predicted"].get("on", {}).get(gpu.label, {})
    if "parts" not in here or "step_seconds" not in row["measured"] or row["work"] != "speed":
        return None
    recipe = _recipe(row)
    moves = recipe["offload"] != "none" or recipe["activations"] in ("offload", "compress")
    paged = recipe["optimizer"].startswith("paged")
    return None if moves or paged else here["parts"]


def _recipe(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row["asked"]["model"]["recipe"]
    return found


def of_rates(rows: Sequence[Row], gpu: GpuType) -> Iterator[dict[str, str]]:
    """What copies and a large product reach, as the constants have it."""
    whole = {"PCIE_REACHED": gpu.pcie, "MEMORY_REACHED": gpu.bandwidth}
    for row in rows:
        if row["work"] != "rates" or row["status"] != "measured":
            continue
        for rate, constant in RATES.items():
            now, value = getattr(speed, constant), row["measured"][rate]
            fit = value / whole[constant] if constant in whole else value * GIGA
            yield {"constant": constant, "now": f"{now:.3g}", "measured": f"{fit:.3g}", "from": rate}
        product = row["measured"]["matmul"] / gpu.half
        yield {"constant": _reached(gpu), "now": f"{speed.reached(gpu):.3g}",
               "measured": f"{product:.3g}", "from": "one large product: at most this"}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
