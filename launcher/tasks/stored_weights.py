"""Weights of a checkpoint directory of `transformers`: a rank reads only its part of most tensors."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.spec.listed_names import listed
from launcher.train.local_shards import local, slices_of
from launcher.train.task import TaskError

STORED = ("F64", "F32", "F16", "BF16")
"Types of weights in safetensors files that are not quantized."


@dataclass
class Source:
    """The stored tensors of a parameter or buffer: one, or all those from which `converter` makes it."""

    names: list[str] = field(default_factory=list)
    converter: Any = None
    "A WeightConverter of transformers."
    patterns: list[str] = field(default_factory=list)
    "For each stored tensor, the pattern of the converter that its name matches."

    def stacks(self, experts: int) -> bool:
        """Whether the parameter's rows are stored as this many tensors of each pattern, one for each
        expert."""
        first = self.converter.operations[0]
        stacks: bool = type(first).__name__ == "MergeModulelist" and first.dim == 0
        return stacks and set(Counter(self.patterns).values()) == {experts}


class Weights:
    """The tensors of a checkpoint directory, in one or more safetensors files."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():  # transformers chooses the same: an index next to it may be outdated
            files = [single]
        elif index.is_file():
            try:
                named = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError) as error:
                raise TaskError(f"{index} is not the index of a checkpoint: {error}") from None
            files = [folder / name for name in sorted(named)]
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise TaskError(
                f"{folder} has no *.safetensors; write them with save_pretrained, or use pretrained: false "
                "for random weights"
            )
        if missing := [file.name for file in files if not file.is_file()]:
            raise TaskError(f"{folder} has no {listed(missing)}, which its {index.name} names")
        opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self._sources: dict[str, Source] = {}

    def __str__(self) -> str:
        return str(self.folder)

    def match(self, model: nn.Module) -> list[str]:
        """Find the stored tensors of each parameter and buffer of a model of `transformers`.

        Return the stored tensors that the model does not have, except those that transformers ignores.
        """
        wanted, prefix = set(model.state_dict()), getattr(model, "base_model_prefix", "")
        renamings, converters = _conversions(model)
        self._model = copy.deepcopy(model).to("meta")  # converters look up shapes
        sources: defaultdict[str, Source] = defaultdict(Source)
        unused = []
        for stored in sorted(self._file, key=_by_number):
            name, converter, pattern = stored, None, None
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            for candidate in converters:
                name, pattern = candidate.rename_source_key(name)
                if pattern is not None:
                    converter = candidate
                    break
            targets = [name]
            if converter is not None:
                first = converter.target_patterns[0]
                targets = [name.replace(first, target) for target in converter.target_patterns]
            known = [own for target in targets if (own := _name_in(wanted, target, prefix)) is not None]
            if not known and (own := _name_in(wanted, stored, prefix)) is not None:
                known, converter = [own], None  # saved with the model's own names
            for own in known:
                source = sources[own]
                source.converter = converter
                source.names.append(stored)
                source.patterns.append(pattern or stored)
            if not known:
                unused.append(stored)
        self._sources = dict(sources)
        ignored = [
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            *(r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"),  # buffers of checkpoints of earlier versions
        ]
        return sorted(name for name in unused if not any(re.search(pattern, name) for pattern in ignored))

    def fill(self, tensor: torch.Tensor, names: Iterable[str]) -> bool:
        """Fill a parameter or buffer that has these names in the model; return False if none is stored.

        Raises TaskError for a tensor of another shape or of a quantized type, and for names that are stored
        with different values.
        """
        stored_under = [name for name in names if name in self._sources]
        if not stored_under:
            return False
        name, *others = stored_under
        source = self._sources[name]
        for stored in source.names if tensor.is_floating_point() else ():
            if (dtype := self._file[stored].get_slice(stored).get_dtype()) not in STORED:
                raise TaskError(
                    f"{self}: {stored} is quantized to {dtype}; save the model in 16 bits or more"
                )
        if not local(tensor).numel():
            return True  # this rank has no part of it
        slices = slices_of(tensor)
        whole: Any = self._file[source.names[0]]
        if source.converter is None:
            whole = whole.get_slice(source.names[0]) if slices else whole.get_tensor(source.names[0])
            shape = list(whole.get_shape() if slices else whole.shape)
        elif source.stacks(tensor.shape[0]):
            whole = self._converted(name, source, slices[0])
            slices = (slice(None), *slices[1:])
            shape = [tensor.shape[0], *whole.shape[1:]]
        else:
            whole = self._converted(name, source)
            shape = list(whole.shape)
        if shape != list(tensor.shape):
            raise TaskError(f"{self}: {source.names[0]} is {shape}, but the config has {list(tensor.shape)}")
        copy_part(whole, tensor, slices)
        for other in others:
            self._check_equal(name, other, slices)
        return True

    def _check_equal(self, name: str, other: str, slices: tuple[slice, ...]) -> None:
        """Raise TaskError if two names of a tied parameter are stored with different values."""
        names = [self._sources[each].names[0] for each in (name, other)]
        values = [self._file[stored].get_slice(stored)[slices].float() for stored in names]
        if not torch.equal(*values):
            raise TaskError(
                f"{self}: {names[0]} and {names[1]} have different values, but the config ties them into one "
                "parameter: set tie_word_embeddings to false in config.json, or leave out the wrong one"
            )

    def _converted(self, name: str, source: Source, experts: slice = slice(None)) -> torch.Tensor:
        """Return the tensor that transformers makes of several stored tensors, or of a part of one.

        `experts`: only of these rows, if the source stacks them.
        """
        converter, model, read = copy.deepcopy(source.converter), self._model, defaultdict(list)
        for stored, pattern in zip(source.names, source.patterns, strict=True):
            read[pattern].append(stored)
        for pattern, stored_names in read.items():
            for stored in stored_names[experts]:
                converter.add_tensor(name, stored, pattern, self._file[stored].get_tensor(stored))
        converted = converter.convert(name, model=model, config=model.config)
        value: torch.Tensor | list[torch.Tensor] = converted.get(name, next(iter(converted.values())))
        return value[0] if isinstance(value, list) else value

    def fingerprint(self) -> int:
        """Return a hash of the first row of each tensor. It does not change if the tensors are saved again in
        other files or with more digits."""
        digest = hashlib.sha256()
        for name in sorted(self._file):
            stored = self._file[name].get_slice(name)
            row = stored[:1] if stored.get_shape() else self._file[name].get_tensor(name)
            digest.update(name.encode())
            digest.update(row.to(torch.bfloat16).flatten().view(torch.uint8).numpy())
        return int.from_bytes(digest.digest()[:8], "little")


@torch.no_grad()
def copy_part(whole: Any, tensor: torch.Tensor, slices: tuple[slice, ...] | None = None) -> None:
    """Copy this rank's part of `whole`. A slice of a safetensors file reads only that part."""
    part = local(tensor)
    if part.numel():
        part.copy_(whole[slices_of(tensor) if slices is None else slices])


def _conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return the rules by which transformers renames a checkpoint's tensors, and those by which it converts
    them.

    Both are empty before transformers 5: models then had the names of their checkpoints.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return [], []
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters


def _name_in(wanted: set[str], name: str, prefix: str) -> str | None:
    """Return the name in the model. A model with a head has a prefix that a model without one lacks."""
    candidates = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((candidate for candidate in candidates if candidate in wanted), None)


def _by_number(name: str) -> list[int | str]:
    """The order in which converters expect tensors: `experts.2` before `experts.10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
