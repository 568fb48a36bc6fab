"""Causal language models of `transformers`, from a config or from a checkpoint that is read in parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.overrides import TorchFunctionMode

from launcher.spec.listed_names import listed
from launcher.tasks.stored_weights import Weights, copy_part
from launcher.tasks.text import Text
from launcher.tasks.windows import Windows, check_counts
from launcher.train.ddp import without_ddp
from launcher.train.initialise import draw_normal
from launcher.train.loss import chunked_cross_entropy, cross_entropy, loss_in_place_of_logits
from launcher.train.outer_units import embedding_and_head
from launcher.train.pipeline.cut import is_elsewhere
from launcher.train.pipeline_parts import Pipeline
from launcher.train.rank import SetupError
from launcher.train.task import ParallelPlan, Split, Task, TaskError
from launcher.train.tensor_parallel import (
    HeadsParallel,
    ReplicatedInCutRegion,
    RowsOfHeads,
    VocabularyParallel,
    matches,
)
from launcher.train.tracing.fake_model import no_packed_mask

IGNORED = -100
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt"),
)
"A directory with one of these files has a tokenizer."
WEIGHT_FILES = ("*.safetensors", "*.index.json", "pytorch_model*", "consolidated*", "*.gguf")
"A directory with one of these files is a checkpoint, even if its weights cannot be read here."
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": VocabularyParallel,
    "replicated_with_grad_allreduce": ReplicatedInCutRegion,
}
"Styles of transformers' plans -> torch's."


class CausalLM(Task):
    """Trains any model that `AutoModelForCausalLM` supports on windows of a text.

    `path` is a directory with a `config.json`, or a config file. The weights are read from safetensors files
    in the directory, or are random if it has no weights or `pretrained` is false. The default of `tokenizer`
    is the directory, if it has one. `data`, `field`, `tokenizer`, `dtype` and `held_out` are those of
    launcher.tasks.text.Text. Nothing is downloaded.
    """

    counts: ClassVar[Literal["samples", "tokens"]] = "tokens"
    built_on_meta: ClassVar[bool] = True

    def __init__(
        self,
        path: str,
        pretrained: bool | None = None,
        data: str | None = None,
        context: int = 512,
        tokenizer: str | None = None,
        field: str = "text",
        dtype: Literal["uint16", "uint32"] = "uint16",
        held_out: float = 0.1,
    ) -> None:
        check_counts(context=context)
        self.path, self.config, self.context = path, _config(path), context
        if type(self).model is CausalLM.model:
            _check_causal(path, self.config)
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is not None and context > longest:
            raise TaskError(f"context: {context} is more than the {longest} positions of {path}")
        routers = getattr(self.config.get_text_config(), "output_router_logits", False)
        if routers and type(self).loss is CausalLM.loss:
            raise TaskError(
                f"output_router_logits of {path} asks for the experts' auxiliary loss, which CausalLM does "
                "not compute: set it to false, or add outputs.aux_loss in loss() of a subclass"
            )
        if tokenizer is None and any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = path
        self.text = Text(data, field, tokenizer, dtype, held_out)
        if pretrained is None:
            pretrained = any(file for pattern in WEIGHT_FILES for file in Path(path).glob(pattern))
        self.weights = Weights(Path(path)) if pretrained else None
        self._unused: list[str] = []

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        family: Any = AutoModelForCausalLM
        with torch.device("cpu"), _EmptyOnMeta():
            model: nn.Module = family.from_config(self.config, dtype=torch.float32)
        self._keep_values(model)
        return model.to("meta")

    def initialise(self, model: nn.Module, seed: int) -> None:
        for names in self._tied:
            first = dict(model.named_parameters(remove_duplicate=False)).get(names[0])
            for name in names[1:] if first is not None else ():
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, first)
        for name, buffer in self._buffers.items():
            if is_elsewhere(model, name):
                continue
            owner, _, attribute = name.rpartition(".")
            # Replace the buffer instead of copying into it: recipes that store parameters in bf16 cast
            # buffers, too, and rotary frequencies in bf16 are wrong from the third digit.
            module = model.get_submodule(owner)
            buffer = buffer.to(module._buffers[attribute].device)  # type: ignore[union-attr]
            if self.weights is not None:
                self.weights.fill(buffer, [name])  # such as the bias of a router of experts
            module._buffers[attribute] = buffer
        missing = []
        for name, parameter in model.named_parameters():
            if self.weights is None:
                self._initialise_parameter(name, parameter, seed)
            elif not self.weights.fill(parameter, self._names(name)):
                missing.append(name)
        if missing:
            raise TaskError(f"{self.weights} has no {', '.join(missing[:5])} ({len(missing)} in all)")
        if self._unused and (not dist.is_initialized() or dist.get_rank() == 0):
            print(
                f"{self.weights} has weights that its config.json leaves out of the model: "
                f"{listed(self._unused)}",
                flush=True,
            )
        self._unused = []  # adapters call this again for each layer

    def weights_fingerprint(self) -> int | None:
        return None if self.weights is None else self.weights.fingerprint()

    def data(self, split: Split) -> Windows:
        reads_bytes = self.text.tokenizer_path is None and not self.text.data_are_tokens
        if split == "train" and self.weights is not None and reads_bytes:
            print(
                f"{self.weights} has no tokenizer, and the job names none: each byte of the data is a token",
                flush=True,
            )
        return self.text.windows(split, self.context, self.config.get_text_config().vocab_size)

    def example(self) -> torch.Tensor:
        return torch.zeros(self.context + 1, dtype=torch.int64)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        weight = (targets != IGNORED).sum()
        if self.loss_chunks > 1:
            whole: Any = without_ddp(model)
            with loss_in_place_of_logits(whole.get_output_embeddings(), targets, self.loss_chunks, IGNORED):
                return model(input_ids=tokens, use_cache=False).logits, weight
        logits = model(input_ids=tokens, use_cache=False).logits
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), IGNORED), weight

    @cached_property
    def uses_loss_chunks(self) -> bool:  # type: ignore[override]
        """Whether the model returns the result of its output layer, without scaling or capping the logits."""
        from transformers import AutoModelForCausalLM

        family: Any = AutoModelForCausalLM
        try:
            with FakeTensorMode(), torch.no_grad():  # autocast does not support the meta device
                model = family.from_config(self.config, dtype=torch.bfloat16)
                head, tokens = model.get_output_embeddings(), torch.zeros(1, 2, dtype=torch.int64)
                returned: list[torch.Tensor] = []
                head.register_forward_hook(lambda _, __, loss: returned.append(loss))
                with no_packed_mask(), loss_in_place_of_logits(head, tokens, chunks=1):
                    logits = model(input_ids=tokens, use_cache=False).logits
            return len(returned) == 1 and logits is returned[0]
        except Exception:  # the model needs values, for example to route tokens to experts
            return False

    def export_files(self, folder: Path) -> None:
        """Write the configs and the tokenizer."""
        self.config.save_pretrained(folder)
        if (generation := Path(self.path) / "generation_config.json").is_file():
            shutil.copyfile(generation, folder / generation.name)
        if self.text.tokenizer_path is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.text.tokenizer_path, local_files_only=True)
            tokenizer.save_pretrained(folder)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the modules in the model's `_no_split_modules`, or else the children of ModuleLists."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        return blocks or super().blocks(model)

    def outer_units(self, model: nn.Module) -> Iterable[nn.Module]:
        return embedding_and_head(model, self.blocks(model))

    def parallel_plan(self, model: nn.Module) -> ParallelPlan | None:
        """Return the plan of `transformers` for this model, in torch's styles; the default if it has none.

        The logits stay cut by the vocabulary, unless the output layer has the embedding's weight.

        Raises: SetupError for a style that has no counterpart here, such as those of experts.
        """
        styles: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
        whole: Any = model
        output = whole.get_output_embeddings()
        head = next((name for name, module in model.named_modules() if module is output), None)
        tied = {name for names in self._tied for name in names}
        plan: ParallelPlan = {}
        for name, module in model.named_modules():
            style = next((style for key, style in styles.items() if matches(name, key)), None)
            if style is None and styles and _has_row_for_each_head(model, name, module):
                plan[name] = RowsOfHeads()
            if style is None or f"{name}.weight" in tied:
                continue
            if name == head:
                plan[name] = VocabularyParallel()
            elif style == "colwise" and (head_dim := _head_dim(model, name)):
                plan[name] = HeadsParallel(module.out_features // head_dim)
            elif style in STYLES:
                plan[name] = STYLES[style]()
            else:
                raise SetupError(
                    f"tensor: {name} of {type(model).__name__} has the style {style} in the plan of "
                    f"transformers; launcher cuts layers with {', '.join(STYLES)} only. Use sharding: fsdp "
                    "with tensor: 1, or return a plan without this layer from parallel_plan() of a subclass "
                    "of CausalLM: each rank then computes it whole"
                )
        if not plan:
            plan = super().parallel_plan(model) or {}
            if head in plan:
                plan[head] = VocabularyParallel()
        return plan or None

    def pipeline(self, model: nn.Module) -> Pipeline:
        """Run the model in each stage from the embeddings on, without its output layer.

        Raises TaskError for tied weights, and for a model that does more to its logits than the output layer.
        """
        whole: Any = model
        if self._tied:
            names = " and ".join(self._tied[0])
            raise TaskError(f"pipeline: {names} are one weight, used in two stages: use pipeline: 1")
        if not self.uses_loss_chunks:
            raise TaskError(
                f"pipeline: {type(model).__name__} does more to its logits than its output layer: use "
                "pipeline: 1"
            )
        embedding, head, blocks = (
            whole.get_input_embeddings(),
            whole.get_output_embeddings(),
            [*self.blocks(model)],
        )
        inside = {module for unit in (embedding, head, *blocks) for module in unit.modules()}
        others = [
            module
            for module in model.modules()
            if module not in inside and next(module.parameters(recurse=False), None) is not None
        ]

        def middle(x: torch.Tensor, _: Any) -> torch.Tensor:
            return whole.base_model(inputs_embeds=x, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

        def end(x: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return chunked_cross_entropy(
                x, whole.get_output_embeddings(), batch[:, 1:], self.loss_chunks, IGNORED
            )

        return Pipeline(
            begin=lambda batch: whole.get_input_embeddings()(batch[:, :-1]),
            middle=middle,
            end=end,
            before=[embedding],
            blocks=blocks,
            after=[*others, head],
        )

    def _keep_values(self, model: nn.Module) -> None:
        """Store what the meta device and to_empty() lose: ties, buffers, and parameters with values."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._tied = [same for same in names.values() if len(same) > 1]
        self._buffers = dict(model.named_buffers())
        if self.weights is not None:
            self._unused = self.weights.match(model)
        self._values = {
            name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.is_meta
        }
        if lost := [name for name, buffer in self._buffers.items() if buffer.is_meta]:
            raise TaskError(
                f"{type(model).__name__}: buffer {lost[0]} comes from torch.empty, without values"
            )

    def _names(self, name: str) -> list[str]:
        """Return the names of a parameter: several if it is tied."""
        return next((names for names in self._tied if name in names), [name])

    @torch.no_grad()
    def _initialise_parameter(self, name: str, parameter: nn.Parameter, seed: int) -> None:
        """Draw matrices with the config's standard deviation; set norms to one and biases to zero."""
        if name in self._values:
            copy_part(self._values[name], parameter)
        elif parameter.ndim > 1:
            text = self.config.get_text_config()
            draw_normal(parameter, getattr(text, "initializer_range", 0.02), seed, name)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _head_dim(model: nn.Module, name: str) -> int | None:
    """Return the width of an attention head if the layer is part of an attention module."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)


def _has_row_for_each_head(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether the layer has a row of values for each head of its attention, as Cohere's norms of
    queries and keys do."""
    head_dim = _head_dim(model, name)
    if not head_dim or isinstance(module, nn.Linear):
        return False
    attention = model.get_submodule(name.rpartition(".")[0])
    linear = [child for child in attention.children() if isinstance(child, nn.Linear)]
    heads = {layer.out_features // head_dim for layer in linear}
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
    return bool(shapes) and all(len(s) == 2 and s[0] in heads and s[1] == head_dim for s in shapes)


class _EmptyOnMeta(TorchFunctionMode):
    """Creates uninitialised tensors, such as new weights, on the meta device; others keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _config(path: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise TaskError(
            "CausalLM needs transformers, which is not installed: pip install transformers"
        ) from None
    file = Path(path)
    if not (file.is_file() or (file / "config.json").is_file()):
        raise TaskError(f"path: {path} is neither a config file nor a directory with a config.json")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError) as error:
        raise TaskError(f"path: transformers cannot read the config {path}: {error}") from None


def _check_causal(path: str, config: Any) -> None:
    """Raise TaskError if transformers has no causal language model with this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TaskError(
            f"path: {path} describes a model of type {config.model_type}, which is not a causal language "
            "model of transformers: write a task for it (docs/tasks.md), or for a command declare plan.params"
        )
