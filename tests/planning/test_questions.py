from __future__ import annotations

from launcher.planning.questions import (
    Answer,
    cheapest_first,
    compare_gpus,
    for_tokens,
    largest_micro_batch,
    least_gpus,
)
from tests.planning.anchors import LLAMA
from tests.planning.closed_form_model import Toy


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    toy = Toy()
    recipe = toy.space().base.model_copy(update={"activations": "checkpoint"})
    found = largest_micro_batch(recipe, toy, toy.capacity)
    assert found is not None and found.recipe.micro_batch_size > 1
    more = recipe.model_copy(update={"micro_batch_size": found.recipe.micro_batch_size + 1})
    assert toy.capacity.misfit(toy(more).estimate) is not None
    tried = [one.micro_batch_size for one in toy.asked[:-1]]
    assert len(tried) < 14 and len(set(tried)) == len(tried)


def test_no_micro_batch_fits_where_the_states_do_not():
    toy = Toy(gpus=1, decoder=LLAMA["70B"])
    assert largest_micro_batch(toy.space().base, toy, toy.capacity) is None


def test_the_limit_ends_the_search_where_memory_has_none():
    toy = Toy()
    unlimited = toy.capacity.model_copy(update={"card": None, "host": None})
    found = largest_micro_batch(toy.space().base, toy, unlimited, limit=100)
    assert found is not None and found.recipe.micro_batch_size == 100


def test_the_fewest_gpus_are_the_first_on_which_something_fits():
    def on(gpus: int) -> Toy:
        return Toy(gpus=gpus, gpu="A100 80GB", decoder=LLAMA["70B"], host=200 * 2**30, per_rank=2)

    answer = least_gpus((1, 2, 4, 8, 16, 32), lambda gpus: on(gpus).choice)
    assert answer is not None
    gpus, choice = answer
    assert choice.chosen is not None and on(gpus // 2).choice.chosen is None
    assert least_gpus((1, 2), lambda gpus: on(gpus).choice) is None


def test_gpus_are_compared_by_speed_and_those_that_are_too_small_come_last():
    def on(label: str) -> Toy:
        return Toy(gpus=1, gpu=label, per_rank=4, host=32 * 2**30)

    answers = compare_gpus(("RTX 3060", "A100 80GB", "H200", "B200"), lambda label: on(label).choice)
    fitting = [one for one in answers if one.choice.chosen is not None]
    assert [one.speed for one in fitting] == sorted((one.speed for one in fitting), reverse=True)
    assert answers[0].label == "B200" and answers[-1].label == "RTX 3060" and answers[-1].speed == 0


def test_the_cheapest_is_by_the_price_of_the_tokens_not_of_the_hour():
    def on(gpu: str, price: float | None) -> Answer:
        return for_tokens(Answer(gpu, Toy(gpu=gpu).choice), 1e9, 2048, 8, price)

    unknown = for_tokens(Answer("unknown", Toy(known=False).choice), 1e9, 2048, 8, 0.1)
    assert unknown.choice.chosen is not None and unknown.hours is None and unknown.usd is None
    answers = cheapest_first([unknown, on("H200", None), on("RTX A6000", 0.49), on("H100", 2.99)])
    assert [one.label for one in answers] == ["H100", "RTX A6000", "H200", "unknown"]
    hours = 1e9 / 2048 / answers[0].speed / 3600
    assert answers[0].hours == hours and answers[0].usd == hours * 8 * 2.99
