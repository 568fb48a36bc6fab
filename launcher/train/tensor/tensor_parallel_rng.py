"""Random numbers under tensor parallelism: the same on the ranks of a group, unless activations are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _random as of_dtensors
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from launcher.train.local_shards import local
from launcher.train.rank import SetupError
from launcher.train.seeds import derive_seed
from launcher.train.tensor.cut_adapter import OF_ANY_MODULE, dropouts_of, drops_parts

LAST = (Shard(-1),)


class OwnNumbers:
    """Gives each rank its own random numbers between a layer that cuts activations and the next layer that
    adds them up: the dropout of attention weights must differ between heads, whichever rank has them.

    The seed of a rank's own numbers is drawn from the common ones. A recomputation starts with the same
    random state, and the same state of this object, as its forward pass. In compiled code, whose random
    numbers come from seeds that it draws at once, a mark says where own numbers begin and end, and
    `give_own_numbers` replaces it.
    """

    def __init__(self, mesh: DeviceMesh, *, traced: bool) -> None:
        self.mesh, self._cuda = mesh, mesh.device_type == "cuda"
        self._common: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._own: tuple[torch.Tensor, torch.Tensor | None] | None = None
        "The state of the own numbers while this rank draws common ones."
        self._began_with = 0
        "The seed of the own numbers."
        self._traced = traced
        "Tensors have no values, and nothing is drawn."
        self.adapter_drops = False
        "An adapter has a dropout. Its input is a DTensor, which marks do not support."
        self._seed = torch.zeros((), dtype=torch.int64)
        "The seed of the compiled block that runs."

    def new_seed(self, *_: object) -> None:
        """Draw the seed of the next compiled block."""
        if not self._traced:
            self._seed = torch.tensor(self._draw())

    def _draw(self) -> int:
        return derive_seed("tensor", int(torch.randint(2**62, ())), self.mesh.get_local_rank())

    def begin(self, *_: object) -> None:
        if self._common is None and not self._traced:
            seed = self._draw()
            self._common = self._state()
            self._began_with = seed
            torch.manual_seed(seed)

    def begin_after(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            marked: torch.Tensor = mark(output, self._seed)
            return marked
        self.begin()
        return None

    def end_before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            self.end()
            return None
        x, *rest = args
        if not isinstance(x, DTensor):
            return mark(x, None), *rest
        part = mark(x.to_local(grad_placements=x.placements), None)
        marked = DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        return marked, *rest

    def end(self, *_: object) -> None:
        if self._common is not None:
            self._set(self._common)
            self._common = None

    def recomputable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that is called twice, the second time for the recomputation. A rank's own numbers
        may start in an earlier block, and end in a later one."""
        began, recomputes = (self._common, self._began_with), False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal recomputes
            if not recomputes:
                recomputes = True
                return forward(*args, **kwargs)
            now = self._common, self._began_with
            self._common, self._began_with = began
            try:
                return forward(*args, **kwargs)
            finally:  # torch ends a recomputation early with an exception
                self._common, self._began_with = now

        return run

    def leave_model(self, *_: object) -> None:
        """Call this after the model, or a stage. Raises SetupError if own numbers were drawn where
        activations may be whole again."""
        if self._common is not None and self._drew():
            raise SetupError(
                "tensor above 1 with dropout: after a layer that cuts activations, no RowwiseParallel layer "
                "adds them up, so it is not known which random numbers must be equal on all ranks. Change "
                "parallel_plan(), or use tensor: 1"
            )
        self.end()

    def _drew(self) -> bool:
        """Return whether random numbers were drawn since own numbers began."""
        for state, device in zip(self._state(), ("cpu", "cuda"), strict=True):
            if state is not None:
                fresh = torch.Generator(device).manual_seed(self._began_with).get_state()
                if not torch.equal(fresh, state):
                    return True
        return False

    def pause(self, *_: object) -> None:
        """Draw common numbers until `resume`."""
        if self._common is not None:
            self._own = self._state()
            self._set(self._common)

    def resume(self, *_: object) -> None:
        if self._own is not None:
            self._common = self._state()
            self._set(self._own)
            self._own = None

    def _state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if self._cuda else None

    def _set(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        on_host, on_gpu = state
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


class NumbersOfParts:
    """The random numbers of an operator on a DTensor, on CPU ranks. torch has such a tracker for GPUs only,
    and on a CPU would draw the same numbers for each part.

    A divided tensor gets numbers from a seed that depends on the common numbers and the part. All ranks draw
    equally many common numbers, even if their parts differ in size.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(
        self, spec: DTensorSpec, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        divided = [dim for dim, placement in enumerate(spec.placements) if placement.is_shard()]
        if not divided:
            yield
            return
        if torch.compiler.is_compiling() or detect_fake_mode() is not None:
            raise SetupError(
                "compile: true with tensor above 1 and random numbers, such as those of dropout, for a "
                "divided DTensor is not possible on a CPU. Use compile: false, or a style with "
                "use_local_output"
            )
        common = int(torch.randint(2**62, (), generator=generator))
        place = spec.mesh.get_coordinate() or ()
        state = torch.get_rng_state()
        torch.manual_seed(derive_seed("part", common, *(place[dim] for dim in divided)))
        try:
            yield
        finally:
            torch.set_rng_state(state)


def draw_own_numbers(
    model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh
) -> OwnNumbers:
    """Let the model's ranks draw own numbers where `styles` cut activations. Its forward begins and ends with
    the common numbers. A model whose tensors have no values, which is traced, draws none."""
    traced = any(is_fake(local(parameter)) for parameter in model.parameters())
    numbers = OwnNumbers(mesh, traced=traced)
    if mesh.device_type == "cpu":
        of_dtensors._rng_tracker = None if traced else NumbersOfParts()  # type: ignore[assignment]
    for module, style in styles.items():
        if isinstance(style, ColwiseParallel | RowwiseParallel) and style.input_layouts == LAST:
            # Before the style's own hook, which makes a DTensor of the input.
            module.register_forward_pre_hook(numbers.end_before, prepend=True)
        if isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == LAST:
            module.register_forward_hook(numbers.begin_after)
        for dropout in () if isinstance(style, OF_ANY_MODULE) else dropouts_of(module):
            numbers.adapter_drops = True
            # Several layers have the same input, and an adapter may follow a layer that has cut activations.
            first, then = (
                (numbers.begin, numbers.end) if drops_parts(module) else (numbers.pause, numbers.resume)
            )
            dropout.register_forward_pre_hook(first)
            dropout.register_forward_hook(then)
    model.register_forward_hook(numbers.leave_model)
    return numbers


@torch.library.custom_op("launcher::own_numbers", mutates_args=())
def mark(x: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
    """Return x. In a graph, this marks where own numbers begin, or end if `seed` is None."""
    return x.clone()


@torch.library.custom_op("launcher::random_state", mutates_args=())
def random_state(seed: torch.Tensor, number: int, device: str) -> torch.Tensor:
    """Return the state of a generator of `device` for one of the operators that draw with this seed."""
    generator = torch.Generator(device)
    generator.manual_seed(derive_seed("operator", int(seed), number))
    return generator.get_state()


@mark.register_fake
def _(x: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(x)


@random_state.register_fake
def _(seed: torch.Tensor, number: int, device: str) -> torch.Tensor:
    return torch.empty(torch.Generator(device).get_state().shape, dtype=torch.uint8, device="cpu")


mark.register_autograd(lambda _, gradient: (gradient, None))


UNBALANCED = (
    "a layer of a block cuts activations, which a layer of another block adds up: return both as one block "
    "from blocks()"
)


def give_own_numbers(graph: fx.Graph) -> None:
    """Let operators between marks draw from their own random states, and remove the marks.

    A pass over the graph that AOTAutograd makes of a block, in the order of its forward pass. The states are
    functions of the block's seed. The numbers do not depend on the order of operators that the compiler
    chooses, nor on recomputation, and the common numbers are the same on all ranks.
    """
    seed: fx.Node | None = None
    drawn = 0
    for node in list(graph.nodes):
        if node.target is torch.ops.launcher.own_numbers.default:
            x, begins = node.args
            seed = begins and (seed or begins)  # several layers may cut before one adds up
            node.replace_all_uses_with(x)
            graph.erase_node(node)
        elif seed is not None and _draws(node):
            _with_own_state(graph, node, seed, drawn)
            drawn += 1
    if seed is not None:
        raise SetupError(UNBALANCED)


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((one.name for one in schema.arguments), node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 1.0))  # fused attention without dropout draws nothing


def _with_own_state(graph: fx.Graph, node: fx.Node, seed: fx.Node, number: int) -> None:
    drawn = node.meta["val"]
    first = drawn[0] if isinstance(drawn, tuple | list) else drawn
    operator, device = torch.ops.launcher.random_state.default, first.device.type
    arguments: tuple[Any, ...]
    with graph.inserting_before(node):
        state = graph.call_function(operator, (seed, number, device))
        arguments = state, node.target, *node.args
        run = graph.call_function(torch.ops.higher_order.run_with_rng_state, arguments, node.kwargs)
    with first.fake_mode:
        state.meta = {**node.meta, "val": operator(seed.meta["val"], number, device)}
    run.meta = node.meta
    node.replace_all_uses_with(run)
    graph.erase_node(node)
