"""`launcher compare`: runs by name, what differs, the results, in a table, as CSV, JSON and a page."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import launcher
from launcher.api.compare import chosen, compared
from launcher.report.comparison import Comparison, parallel
from launcher.report.comparison_html import as_html
from launcher.report.comparison_text import show_comparison
from launcher.rundir.files import append_json, parsed
from launcher.rundir.find import RunNotFoundError
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.spec.errors import UsageError
from tests.lab import Lab
from tests.report.written_run import Log, recipe

EVIL = "</script><script>alert(1)</script>"


def trained(path: Path, lr: float, loss: float, name: str = "gpt", **fields: Any) -> RunDir:
    log = Log(path)
    log.about(name, steps=10, train={"lr": lr}, **fields)
    log.event("submitted")
    log.event("started", 5.0, host="n")
    log.event("attempt", attempt=0, recipe=recipe(16))
    for step in range(1, 11):
        log.steps(
            0, step, step, 1.0, loss=loss + 10 - step, eval_loss=loss + abs(step - 8), memory_peak=step,
            tokens_per_second=100.0 / lr, weight=50.0, accuracy=lr,
        )  # fmt: skip
    log.event("finished", state="succeeded", failure="succeeded", reason="done")
    log.state("succeeded")
    return log.run


@pytest.fixture
def runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = lab.folder / "runs"
    trained(root / "gpt-1", 1.0, 3.0, tags=("ablation",))
    trained(root / "gpt-2", 0.1, 1.0)
    trained(root / "other-1", 0.01, 2.0, name="other", tags=("ablation",), env={"WIDTH": EVIL})
    monkeypatch.chdir(lab.folder)
    monkeypatch.setenv("XDG_STATE_HOME", lab.environ["XDG_STATE_HOME"])
    return root


def of(*names: str, by: str | None = None) -> Comparison:
    return compared(chosen(names), by)


def test_the_peak_of_a_command_is_that_of_its_memory_samples(runs: Path) -> None:
    log = Log(runs / "script-1")
    log.about("script", steps=3)
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.steps(0, 1, 3, 1.0, loss=1.0)
    log.state("succeeded")
    memory = log.run.attempt(0).memory(0)
    memory.parent.mkdir(parents=True)
    for sample, (rss, used) in enumerate([(9, 3), (7, 8), (5, 4)], 1):
        append_json(memory, {"time": now(), "sample": sample, "rss": rss, "used": used, "cpu": 100})
    assert of("script-1").runs[0].results["peak_memory"] == 8, "of the GPU, if it is known"
    memory.write_text(memory.read_text().replace("used", "unused"))
    assert of("script-1").runs[0].results["peak_memory"] == 9


def test_runs_are_named_by_id_job_tag_pattern_and_path(runs: Path) -> None:
    def ids(*names: str) -> list[str]:
        return sorted(run.id for run in chosen(names))

    assert ids("gpt") == ["gpt-1", "gpt-2"]
    assert ids("ablation") == ["gpt-1", "other-1"]
    assert ids("*-1") == ["gpt-1", "other-1"]
    assert ids("other-1", "gpt-2", "other") == ["gpt-2", "other-1"]
    assert ids(str(runs / "gpt-1")) == ["gpt-1"]
    for unknown in ("nothing", "no*"):
        with pytest.raises(RunNotFoundError):
            chosen([unknown])


def test_a_sweep_stands_for_its_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in range(3):
        run = trained(lab.folder / "runs" / f"gpt-sweep-x-{task}", 0.1 + task, 1.0)
        about = run.read_about()
        run.submitted.write_text(json.dumps({**about.as_json(), "sweep": {"id": "gpt-sweep-x"}}))
    monkeypatch.chdir(lab.folder)
    monkeypatch.setenv("XDG_STATE_HOME", lab.environ["XDG_STATE_HOME"])
    assert [run.id for run in chosen(["gpt-sweep-x"])] == [f"gpt-sweep-x-{task}" for task in range(3)]


def test_what_differs_comes_first_and_what_is_the_same_is_left_out(runs: Path) -> None:
    assert of("gpt").differing == ("train.lr",)
    assert set(of("*").differing) == {"train.lr", "env.WIDTH"}
    assert of("gpt-1").differing == ()


def test_a_number_of_ranks_is_compared_once_and_as_the_run_had_it(runs: Path) -> None:
    run = trained(runs / "wide-1", 0.1, 1.0, resources={"ranks_per_node": 4})
    run.submitted.write_text(json.dumps({**run.read_about().as_json(), "ranks_per_node": 4}))
    found = of("gpt-2", "wide-1")
    assert found.differing == ("resources.ranks_per_node",)
    assert [found.value(one, "resources.ranks_per_node") for one in found.runs] == [2, 4]


def test_results_are_the_last_value_the_best_evaluation_and_what_it_cost(runs: Path) -> None:
    (run,) = of("gpt-1").runs
    assert run.results["loss"] == 3 and run.results["eval_loss"] == 3 and run.results["tokens"] == 500
    assert run.results["seconds"] == 10 and run.results["usd"] == pytest.approx(10 * 4 / 3600)
    assert run.results["peak_memory"] == 10 and run.results["step"] == 10


@pytest.mark.parametrize(
    ("by", "first"),
    [
        ("eval_loss", "gpt-2"),
        ("tokens_per_second", "other-1"),
        ("accuracy", "gpt-1"),
        ("train.lr", "other-1"),
    ],
)
def test_the_best_run_is_the_first(runs: Path, by: str, first: str) -> None:
    assert of("*", by=by).runs[0].run == first


def test_the_best_of_an_evaluation_is_what_its_name_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = ("wer", "cer", "mse", "val_rmse", "mae_epoch", "ppl", "nll", "fid", "bits_per_byte", "top5_error")
    higher = ("acc_norm", "accuracy", "f1", "bleu", "map", "normalized_score", "accuracy_per_class")
    log = Log(lab.folder / "runs" / "speech-1")
    log.about("speech", steps=3)
    log.event("attempt", attempt=0, recipe=recipe(16))
    for step, value in enumerate((2.0, 1.0, 3.0), 1):
        log.steps(0, step, step, 1.0, **{f"eval_{name}": value for name in (*lower, *higher)})
    log.state("succeeded")
    monkeypatch.chdir(lab.folder)
    results = of("speech-1").runs[0].results
    assert {name: results[f"eval_{name}"] for name in lower} == dict.fromkeys(lower, 1.0)
    assert {name: results[f"eval_{name}"] for name in higher} == dict.fromkeys(higher, 3.0)


def test_a_run_whose_loss_became_nan_has_no_last_loss_and_comes_last(runs: Path) -> None:
    diverged = trained(runs / "gpt-3", 1.0, -50.0)
    last = parsed(diverged.metrics.read_bytes().splitlines()[-1])
    append_json(diverged.metrics, {**last, "loss": None, "eval_loss": None})
    found = of("gpt", by="loss")
    assert [run.run for run in found.runs][-1] == "gpt-3"
    assert "loss" not in found.runs[-1].results and found.runs[-1].results["eval_loss"] == -50


def test_an_escape_sequence_in_a_metrics_name_changes_no_other_column(lab: Lab, runs: Path) -> None:
    steps = runs / "gpt-1" / "metrics.jsonl"
    steps.write_text(steps.read_text().replace('"accuracy"', '"\\u001b[31mred\\nname"'))
    rows = list(csv.DictReader(io.StringIO(lab.cli("compare", "gpt-1", "--csv").stdout)))
    assert rows[0]["^[[31mred\nname"] == "1.0" and rows[0]["peak_memory"] == "10.0"
    table = lab.cli("compare", "gpt-1").stdout
    assert "\x1b" not in table and "\\x1b[31mred\\nname" in table


def test_an_unknown_order_names_those_that_there_are(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"there are .*eval_loss.*train\.lr"):
        of("*", by="evalloss")
    with pytest.raises(UsageError, match=r"^--by a\\nb\\x1b: no run has it; [^\n]*$"):
        of("*", by="a\nb\x1b")


@pytest.mark.parametrize(("width", "tables"), [(24, 0), (40, 0), (80, 3), (200, 2)])
def test_a_terminal_of_any_width_shows_whole_ids_names_and_values(
    runs: Path, width: int, tables: int
) -> None:
    ids = [f"wide-sweep-20261126-125825-f699-{number}" for number in range(3)]
    for number, one in enumerate(ids):
        trained(runs / one, 0.125 + number, 3.25 - number, name="wide")
    out = io.StringIO()
    show_comparison(Console(file=out, width=width), of("wide", by="loss"))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("run ") for line in lines) == tables
    text = "".join(lines) if width < len(ids[0]) else out.getvalue()
    assert sorted(ids, key=text.index) == ids[::-1], "whole, the best first"
    assert {"tokens_per_second", "peak_memory", "1.25", "2.25", "3.25"} <= {
        *out.getvalue().split()
    } or width < 40
    if tables:
        assert sum(line.split()[:1] == [ids[0]] for line in lines) == tables
    else:
        assert text.index(ids[2]) < text.index("2.125") < text.index("1.25") < text.index(ids[1])


def test_the_verb_prints_a_table_csv_and_json_and_writes_a_page(lab: Lab, runs: Path) -> None:
    table = lab.cli("compare", "gpt", "--by", "eval_loss", "-o", "page.html")
    assert table.returncode == 0, table.stderr
    assert table.stdout.index("train.lr") < table.stdout.index("eval_loss")
    assert table.stdout.index("gpt-2") < table.stdout.index("gpt-1")
    lab.environ["COLUMNS"] = "60"
    narrow = lab.cli("compare", "gpt").stdout.splitlines()
    assert sorted(next(line.split()[1:] for line in narrow if line.startswith("loss "))) == ["1", "3"]
    page = (lab.folder / "page.html").read_text()
    assert "What differs" in page and page.count("<script") == 3
    rows = list(csv.DictReader(io.StringIO(lab.cli("compare", "*", "--csv").stdout)))
    assert {row["run"]: float(row["train.lr"]) for row in rows} == {"gpt-1": 1, "gpt-2": 0.1, "other-1": 0.01}
    told = lab.json("compare", "gpt", "--by", "loss")
    assert told["differing"] == ["train.lr"] and told["runs"][0]["results"]["loss"] == 1
    assert lab.cli("compare", "nothing").returncode == 3
    assert lab.cli("compare", "gpt", "--csv", "--json").returncode == 2


def test_a_page_shows_parallel_axes_and_escapes_what_a_job_says(runs: Path) -> None:
    found = of("*", by="eval_loss")
    drawn = parallel(found)
    assert drawn is not None
    assert drawn["axes"][0] == "train.lr: 0.01 to 1, logarithmic" and drawn["axes"][-1] == "eval_loss: 1 to 3"
    assert {one["label"]: (one["values"][0], one["values"][-1]) for one in drawn["series"]} == {
        "gpt-1": (1, 1), "gpt-2": (pytest.approx(0.5), 0), "other-1": (0, 0.5),
    }  # fmt: skip
    assert parallel(of("gpt")) is None
    page = as_html(found)
    assert page.count("<script") == page.count("</script>") == 3 and EVIL not in page
    assert '<th scope="col">env.<wbr>WIDTH</th>' in page


def test_python_gets_a_data_frame(runs: Path) -> None:
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install pandas"):
            launcher.runs(root=runs).compare()
    else:
        frame = launcher.runs(root=runs).compare(by="eval_loss")
        assert next(iter(frame.index)) == "gpt-2" and frame.loc["gpt-1", "train.lr"] == 1.0
