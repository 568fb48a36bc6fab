"""What the built-in entrypoint runs today, as data: planning asks here, `launcher.train` refuses by it."""

from __future__ import annotations

from launcher.spec.recipe import Recipe

# A Recipe field that is missing here is not the entrypoint's business (any value runs).
SUPPORTED: dict[str, frozenset[object]] = {
    "precision": frozenset({"fp32", "bf16", "bf16-mixed", "fp16-mixed"}),
    "optimizer": frozenset(
        {"adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "lion", "lion-8bit", "adam-mini"}
    ),
    "sharding": frozenset({"none", "ddp", "fsdp", "fsdp-keep", "hybrid"}),
    "offload": frozenset({"none"}),
    "activations": frozenset({"keep", "selective", "checkpoint", "offload"}),
}

# Why a value is missing above, where it is for a reason and not for lack of time.
WHY_NOT: dict[tuple[str, object], str] = {
    ("precision", "float8"): "torchao's float8 layers need a GPU of compute capability 8.9 to be tested on",
}


TESTED_WITH_HYBRID = frozenset({"adamw"})


def unsupported(recipe: Recipe) -> list[str]:
    """One sentence for each value the entrypoint does not run; empty when the recipe runs."""
    sentences = [
        f"{field}: {getattr(recipe, field)} is not run by the built-in entrypoint{_why(recipe, field)}; "
        f"it runs {', '.join(sorted(map(str, values)))}"
        for field, values in SUPPORTED.items()
        if getattr(recipe, field) not in values
    ]
    if recipe.compile and recipe.activations == "offload":
        sentences.append(
            "compile: True with activations: offload is not run by the built-in entrypoint (what compiled "
            "code saves cannot be told from its weights); activations: checkpoint runs with it"
        )
    if recipe.sharding == "hybrid" and recipe.optimizer not in TESTED_WITH_HYBRID:
        sentences.append(
            f"optimizer: {recipe.optimizer} with sharding: hybrid is untested, so the built-in entrypoint "
            f"does not run it; hybrid runs {', '.join(sorted(TESTED_WITH_HYBRID))}"
        )
    return sentences


def _why(recipe: Recipe, field: str) -> str:
    reason = WHY_NOT.get((field, getattr(recipe, field)))
    return f" ({reason})" if reason else ""
