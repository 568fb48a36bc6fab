"""Values of a sweep: lists in every combination, draws that a seed repeats."""

from __future__ import annotations

import math

import pytest

from launcher.api import sweep_values
from launcher.spec.errors import UsageError

LR = "train.lr=loguniform(1e-5,1e-3)"


def combinations(texts: list[str], samples: int | None = None, seed: int = 0) -> list[tuple[str, ...]]:
    return sweep_values.combinations([*map(sweep_values.field_of, texts)], samples, seed)


def test_draws_are_repeated_by_their_seed_and_differ_for_another() -> None:
    first = combinations([LR], 20, 1)
    assert first == combinations([LR], 20, 1) != combinations([LR], 20, 2)
    assert combinations([LR], 5, 1) == first[:5]
    values = [float(text.partition("=")[2]) for (text,) in first]
    assert all(1e-5 <= value <= 1e-3 for value in values) and len(set(values)) == 20


def test_a_field_has_the_same_draws_beside_another_one() -> None:
    alone = [lr for (lr,) in combinations([LR], 6)]
    assert [lr for _, lr in combinations(["args.dropout=uniform(0,0.5)", LR], 6)] == alone


def test_a_log_uniform_field_has_as_many_values_in_each_decade() -> None:
    values = [float(text.partition("=")[2]) for (text,) in combinations([LR], 2000)]
    low = sum(math.log10(value) < -4 for value in values)
    assert 900 < low < 1100


def test_each_draw_is_combined_with_each_combination_of_the_lists() -> None:
    runs = combinations(["seed=0,1", "steps=randint(3,900)", "a=x,y"], 3)
    assert len(runs) == 12
    assert {(run[0], run[2]) for run in runs} == {(f"seed={s}", f"a={a}") for s in (0, 1) for a in "xy"}
    assert len({run[1] for run in runs}) == 3  # for this seed


def test_both_ends_of_randint_are_drawn() -> None:
    assert {run[0] for run in combinations(["a=randint(1,3)"], 3, 4)} <= {"a=1", "a=2", "a=3"}
    ends = {run[0] for seed in range(40) for run in combinations(["a=randint(1,2)"], 1, seed)}
    assert ends == {"a=1", "a=2"}


@pytest.mark.parametrize(
    ("text", "samples", "said"),
    [
        (LR, None, "with --samples N"),
        ("lr=1,2", 3, "no --sweep draws its values"),
        ("lr=gauss(0,1)", 3, "unknown distribution gauss: use uniform(low,high)"),
        ("lr=loguniform(0,1)", 3, "the logarithm needs numbers above 0"),
        ("lr=loguniform(1e-3,1e-5)", 3, "low must be less than high"),
        ("lr=uniform(0,inf)", 3, "both finite"),
        ("lr=uniform(nan,1)", 3, "both finite"),
        ("lr=uniform(1)", 3, "takes two numbers, uniform(low,high)"),
        ("lr=uniform()", 3, "takes two numbers"),
        ("n=randint(1.5,3)", 3, "takes two integers"),
        ("n=randint(3,1)", 3, "low must not be above high"),
        ("lr=log-uniform(1e-5,1e-3)", None, "unknown distribution log-uniform"),
        ("lr=loguniform(1e-5,1e-3),0.01", 3, "a distribution stands alone"),
        ("a=f(1),g(2)", None, "a distribution stands alone"),
        (LR, 0, "at least one value"),
    ],
)
def test_what_is_malformed_is_refused(text: str, samples: int | None, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        combinations([text], samples)
    assert said in str(refused.value)


def test_a_field_is_named_once() -> None:
    with pytest.raises(UsageError, match="the field is given twice"):
        combinations(["lr=1,2", "lr=3,4"])


def test_a_space_before_the_bracket_changes_nothing_and_quotes_make_a_text() -> None:
    assert combinations(["train.lr=loguniform (1e-5,1e-3)"], 3) == combinations([LR], 3)
    assert combinations(["a='f(1)','g(2)'"]) == [("a=f(1)",), ("a=g(2)",)]
    assert combinations(["""env.A='a,b',"it's",'x',a'b'"""]) == [
        ("env.A=a,b",), ("env.A=it's",), ("env.A=x",), ("env.A=a'b'",),
    ]  # fmt: skip
    assert combinations(["args.a='1',1"]) == [("args.a='1'",), ("args.a=1",)], "a text and a number"


@pytest.mark.parametrize("text", ["a=it's,b", 'a="x,y', "a=f(,b", "a=x),y", "a=[1,2"])
def test_what_is_not_closed_does_not_swallow_the_values_after_it(text: str) -> None:
    with pytest.raises(UsageError, match="no counterpart; put quotes around the value"):
        combinations([text])


def test_texts_of_a_list_are_values_as_they_are() -> None:
    texts = ["a,b", "it's", "x(", "'q'", "uniform(0,1)", ""]
    swept = [sweep_values.Field("env.A", tuple(texts))]
    assert sweep_values.combinations(swept) == [(f"env.A={text}",) for text in texts]
    with pytest.raises(UsageError, match="there is no value"):
        sweep_values.combinations([sweep_values.Field("env.A", ())])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("uniform", 1000000.1, 1000000.4),
        ("loguniform", 1000000.1, 1000000.4),
        ("uniform", -1e308, 1e308),
        ("loguniform", 1e-300, 1e300),
    ],
)
def test_draws_stay_in_the_interval(name: str, low: float, high: float) -> None:
    for (text,) in combinations([f"x={name}({low},{high})"], 200):
        assert low <= float(text.partition("=")[2]) <= high


def test_an_integer_of_any_size_can_be_an_end() -> None:
    assert combinations([f"n=randint(0,{10**400})"], 1)
