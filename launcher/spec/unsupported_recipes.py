"""Valid recipes that the built-in entrypoint cannot run. The planner and each rank check this."""

from __future__ import annotations

from collections.abc import Callable

from launcher.spec.recipe import Recipe

# A compiled block saves autocast's copies of weights without the history that distinguishes them from
# activations.
_COMPILED = (
    "is not run by the built-in entrypoint (what compiled code saves cannot be distinguished from its "
    "weights); activations: checkpoint runs with it"
)

# (combination, sentence with the reason and what runs instead). Every single value is supported.
WHY_NOT: tuple[tuple[Callable[[Recipe], bool], str], ...] = (
    (
        lambda recipe: recipe.compile and recipe.activations == "offload",
        f"compile: true with activations: offload {_COMPILED}",
    ),
    (
        lambda recipe: recipe.compile and recipe.activations == "compress",
        f"compile: true with activations: compress {_COMPILED}, and compress with compile: false",
    ),
    (
        lambda recipe: (
            recipe.pipeline > 1
            and recipe.schedule == "zero-bubble"
            and recipe.activations == "compress"
            and recipe.precision.endswith("-mixed")
        ),
        "schedule: zero-bubble with activations: compress and mixed precision is not run by the built-in "
        "entrypoint (the 16-bit copies of the weights would be compressed, too); schedule: 1f1b runs with it",
    ),
)


def unsupported(recipe: Recipe) -> list[str]:
    """Return one sentence for each unsupported combination. Empty if the recipe runs."""
    return [sentence for applies, sentence in WHY_NOT if applies(recipe)]
