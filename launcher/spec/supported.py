"""What the built-in entrypoint runs today, as data: planning asks here, `launcher.train` refuses by it."""

from __future__ import annotations

from launcher.spec.recipe import Recipe

# A Recipe field that is missing here is not the entrypoint's business (any value runs).
SUPPORTED: dict[str, frozenset[object]] = {
    "precision": frozenset({"fp32", "bf16", "bf16-mixed"}),
    "optimizer": frozenset(
        {"adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "lion", "lion-8bit", "adam-mini"}
    ),
    "sharding": frozenset({"none", "ddp", "fsdp", "fsdp-keep"}),
    "offload": frozenset({"none"}),
    "activations": frozenset({"keep"}),
    "loss_chunks": frozenset({1}),
    "compile": frozenset({False}),
    "grad_scaler": frozenset({False}),
}


def unsupported(recipe: Recipe) -> list[str]:
    """One sentence for each value the entrypoint does not run; empty when the recipe runs."""
    return [
        f"{field}: {getattr(recipe, field)} is not run by the built-in entrypoint; "
        f"it runs {', '.join(sorted(map(str, values)))}"
        for field, values in SUPPORTED.items()
        if getattr(recipe, field) not in values
    ]
