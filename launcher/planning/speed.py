"""The time of a step: a roofline from the work of the trace, the model states and the data sheets.

Kernels run one after the other, so the time of kernels bound by FLOPs and of kernels bound by memory traffic
adds up. Communication overlaps with a pass, except for a stated share; the communication of a tensor-parallel
group does not overlap. docs/speed.md compares this with published throughputs. Excludes kernel launches,
which bound small models on fast GPUs; the data loader; evaluation and checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, States, computes_in, states_of, updated_by
from launcher.memory.trace import Work
from launcher.planning.hardware import GIGA, GpuType, Hardware
from launcher.spec.errors import Problem, SpecError
from launcher.spec.mesh import data_ranks, in_buckets
from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.pipeline_schedule import bubble
from launcher.spec.recipe import RECOMPUTED, REPLICATED, SHARDED, Recipe
from launcher.spec.value import Value

# Share of the data sheet's FLOP/s that training reaches, by GPU or architecture. "Fitted" means to the tables
# in benchmarks/results.
REACHED = {
    "H200": 0.70,  # fitted to six steps measured on one; three published runs on H200 want 0.67 and more
    "Ampere": 0.77,  # fitted (A100)
    "Hopper": 0.57,  # fitted (H100): the power limit keeps the clock below the data sheet's
    "Ada": 0.65,  # assumption: between Ampere and Hopper
    "Volta": 0.65,  # assumption: between Ampere and Hopper
    "Blackwell": 0.57,  # assumption: as Hopper
}
MEMORY_REACHED = 0.85
"Share of the GPU's memory bandwidth that elementwise kernels reach. Fitted."
COMPILED = 0.45
"Share of the memory traffic that is left after torch.compile has fused kernels. Fitted."
FLOAT8_GAIN = 1.37
"Speed-up over 16-bit products; attention, head and casts stay as they are. Fitted."
EXPOSED = 0.5
"Share of overlapping communication that slows kernels down or waits for them. Fitted."
NVLINK_REACHED = 0.80
"Share of NVLink's rate. nccl-tests show about 360 of 450 GB/s bus bandwidth for large all-gathers on 8 H100."
PCIE_RING_REACHED = 0.40
"""Share of PCIe's rate in a ring. Assumption: a ring shares host bridges, and without peer access every byte
goes through the host."""
NETWORK_REACHED = 0.80
"Share of the network's rate. Assumption."
PCIE_REACHED = 0.80
"Share of PCIe's rate for pinned copies: about 25 of 32 GB/s on PCIe 4."
NVME = 2e9
"Bytes/s of a node's disk, read or written. Assumption: one PCIe 4 drive under a sustained mixed load."
HOST_BANDWIDTH = 200e9
"Bytes/s of a node's memory, shared by all ranks. Assumption: 8 channels of DDR4-3200 are 205 GB/s."

PLAIN_TRAFFIC = 3.0
"Memory traffic of an optimizer of plain operators / traffic of a fused kernel. Assumed from their number."


class StepTime(Value):
    """Seconds of one optimizer step. All ranks work in parallel and do the same."""

    compute: float
    "Matrix products, including recomputed ones."
    memory: float
    "Kernels that wait for the GPU's memory."
    communication: float
    "Communication between GPUs, overlapping or not."
    exposed: float
    "The part of `communication` in which nothing else runs."
    tensor: float = 0.0
    "The part of `communication` within tensor-parallel groups; nothing overlaps it."
    bubble: float = 0.0
    "Idle time of a pipeline's stages, while the first and the last micro-batches pass through the others."
    offload: float
    "Copies over PCIe or to NVMe in which nothing else runs."
    optimizer: float
    "The update, on the GPU or on the host, with gradient clipping."
    samples: int
    "Samples of the step: the global batch."

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.exposed + self.bubble + self.offload + self.optimizer

    @property
    def least(self) -> StepTime:
        """The time of a step of many micro-batches, in which the bubble is short."""
        return self.model_copy(update={"bubble": 0.0})

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total


class _Links(NamedTuple):
    """Seconds that one pass spends on links between GPUs and on PCIe."""

    ring: float = 0.0
    pcie: float = 0.0


class _Pass(NamedTuple):
    """Seconds of one or more passes, by what they wait for."""

    compute: float = 0.0
    memory: float = 0.0
    ring: float = 0.0
    exposed: float = 0.0
    offload: float = 0.0
    tensor: float = 0.0


def step_time(
    recipe: Recipe,
    work: Work,
    model: ModelShapes,
    ranks: Ranks,
    hardware: Hardware,
    offloaded: float = 0.0,
) -> StepTime:
    """Return the time of a step of rank 0, the slowest rank.

    `model`: shapes as `recipe.precision` stores them. `offloaded`: bytes of activations that one micro-batch
    moves to the host. Raises SpecError if the GPU has no float8.
    """
    states = states_of(model, recipe, ranks)
    gather = _gather(recipe, model, states, ranks, hardware)
    sync = _synchronise(recipe, model, states, ranks, hardware)
    again = _Links(*(_gathers_in_backward(recipe) * seconds for seconds in gather))
    micro, accum = recipe.micro_batch_size, recipe.grad_accum
    both = _Links(*(a + b for a, b in zip(again, sync, strict=True)))
    syncs = accum if recipe.grad_sync == "each" else 1
    at_end = _average_replicas(recipe, model, ranks, hardware)
    forward = [figure.at(micro) for figure in work[:8:2]]
    backward = [figure.at(micro) for figure in work[1:8:2]]
    passes = (
        (accum, _pass(recipe, ranks, hardware, gather, *forward)),
        (accum - syncs, _pass(recipe, ranks, hardware, again, *backward)),
        (syncs, _pass(recipe, ranks, hardware, both, *backward)),
    )
    sums = _Pass(*(sum(n * seconds[i] for n, seconds in passes) for i in range(len(_Pass._fields))))
    # Copies of activations run in the kernels' stream: launcher.train.activations.activations.offloaded.
    moved = 2 * accum * offloaded / _pcie(hardware)
    passing = sums.compute + sums.memory + sums.exposed + sums.tensor + sums.offload + moved
    optimizer, copies = _optimizer(recipe, model, states, ranks, hardware)
    at_end += _gather_updated(recipe, model, ranks, hardware)
    return StepTime(
        compute=sums.compute,
        memory=sums.memory,
        communication=sums.ring + sums.tensor + at_end,
        exposed=sums.exposed + sums.tensor + at_end,
        tensor=sums.tensor,
        bubble=passing * bubble(recipe, _later(recipe, work, ranks, hardware)),
        offload=sums.offload + moved + copies,
        optimizer=optimizer,
        samples=micro * accum * data_ranks(recipe, ranks.world),
    )


def reached(gpu: GpuType) -> float:
    """Return the share of the data sheet's FLOP/s that training reaches on a GPU."""
    return REACHED.get(gpu.label, REACHED[gpu.architecture])


def _pass(
    recipe: Recipe,
    ranks: Ranks,
    hardware: Hardware,
    links: _Links,
    flops: float,
    traffic: float,
    exchanged: float,
    sent: float,
) -> _Pass:
    gpu = hardware.gpu
    peak = gpu.flops("bf16-mixed" if recipe.precision == "float8" else recipe.precision)
    if gpu.flops(recipe.precision) is None or peak is None:
        message = f"float8 needs compute capability 8.9 or newer; use bf16-mixed on {gpu.label}"
        raise SpecError([Problem("the job", "recipe.precision", message)])
    if recipe.precision == "float8":
        peak *= FLOAT8_GAIN
    compute = flops / (peak * reached(gpu))
    memory = traffic * (COMPILED if recipe.compile else 1.0) / (gpu.bandwidth * GIGA * MEMORY_REACHED)
    kernels, on_links = compute + memory, links.ring + links.pcie
    alone = max(0.0, on_links - kernels) + EXPOSED * min(on_links, kernels)
    share = links.ring / on_links if on_links else 0.0
    # A layer waits for the tensors that its tensor-parallel group exchanges.
    tensor = _ring(exchanged, recipe.tensor, ranks, hardware)
    stages = sent / _between_stages(recipe, ranks, hardware)  # a stage waits for its neighbour
    return _Pass(compute, memory, links.ring + stages, alone * share + stages, alone * (1 - share), tensor)


def _later(recipe: Recipe, work: Work, ranks: Ranks, hardware: Hardware) -> float:
    """Return the share of a backward pass's kernel time that `schedule: zero-bubble` postpones."""
    micro = recipe.micro_batch_size
    all_, later = (
        _pass(recipe, ranks, hardware, _Links(), flops.at(micro), traffic.at(micro), 0.0, 0.0)
        for flops, traffic in (
            (work.backward_flops, work.backward_bytes),
            (work.later_flops, work.later_bytes),
        )
    )
    whole = all_.compute + all_.memory
    return (later.compute + later.memory) / whole if whole else 0.0


def _between_stages(recipe: Recipe, ranks: Ranks, hardware: Hardware) -> float:
    """Return the bytes/s from a rank to the same rank of the next stage."""
    if ranks.world // recipe.pipeline < ranks.per_node:
        return _within_node(hardware)
    return hardware.inter_node * NETWORK_REACHED / ranks.per_node


def _gather(recipe: Recipe, model: ModelShapes, states: States, ranks: Ranks, hardware: Hardware) -> _Links:
    """Return the time to gather all parameters once, in compute type; from the host if offloaded."""
    if recipe.sharding not in SHARDED:
        return _Links()
    width = computes_in(recipe)
    whole = sum(count * p.numel * min(p.itemsize, width) for p, count in model.distinct)
    up = states.host.parameters if recipe.offload == "cpu" else 0
    ring = _ring(whole, ranks.shards(recipe), ranks, hardware, stride=recipe.tensor)
    return _Links(ring, up / _pcie(hardware))


def _gathers_in_backward(recipe: Recipe) -> float:
    """Return how often a backward pass gathers the parameters.

    A block stays gathered from its recomputation on; of `fsdp-layers`, each layer is gathered again.
    """
    if recipe.sharding == "fsdp-keep":
        return 0.0
    recomputes = recipe.activations in RECOMPUTED
    return 1.0 + recipe.checkpoint_ratio if recipe.sharding == "fsdp-layers" and recomputes else 1.0


def _synchronise(
    recipe: Recipe, model: ModelShapes, states: States, ranks: Ranks, hardware: Hardware
) -> _Links:
    """Return the time to reduce gradients once: reduce-scatter over shards, all-reduce over replicas."""
    # FSDP reduces in the type of the shards, DDP in that of the gradients. Both are the parameters' type.
    if in_buckets(recipe):
        return _Links(2 * _ring(model.buckets, ranks.world, ranks, hardware))
    whole = model.gradients
    down = _to_host(recipe, states, ranks, hardware)
    if recipe.sharding not in SHARDED:
        return _Links(pcie=down)
    ring = _ring(whole, ranks.shards(recipe), ranks, hardware, stride=recipe.tensor)
    if recipe.sharding == "hybrid":
        # Each GPU's shard is reduced with its replicas on other nodes. A node's shards share its network.
        nodes = ranks.world // ranks.per_node
        ring += 2 * (nodes - 1) / nodes * whole * recipe.tensor / (hardware.inter_node * NETWORK_REACHED)
    return _Links(ring, down)


def _to_host(recipe: Recipe, states: States, ranks: Ranks, hardware: Hardware) -> float:
    """Return the seconds in which one micro-batch's gradients go to the host.

    For an optimizer on the host another thread adds them up there: launcher.train.optimizers.host_gradients.
    That writes the arriving gradient, reads it, reads the sum except in the first micro-batch, and writes the
    sum.
    """
    gradients = states.host.gradients
    if recipe.gradients_leave:
        traffic = (4 - 1 / recipe.grad_accum) * gradients
        return max(gradients / _pcie(hardware), traffic * ranks.per_node / HOST_BANDWIDTH)
    return gradients / _pcie(hardware) if recipe.offload == "cpu" else 0.0


def _average_replicas(recipe: Recipe, model: ModelShapes, ranks: Ranks, hardware: Hardware) -> float:
    """Return the seconds in which launcher.train.sharding.replicas averages gradients, once in a step;
    nothing overlaps."""
    if recipe.sharding not in REPLICATED or in_buckets(recipe):
        return 0.0
    return 2 * _over_replicas(recipe, model, ranks, hardware)


def _gather_updated(recipe: Recipe, model: ModelShapes, ranks: Ranks, hardware: Hardware) -> float:
    """Return the seconds in which `zero1` gathers the updated parameters once a step; nothing overlaps."""
    return _over_replicas(recipe, model, ranks, hardware) if recipe.sharding == "zero1" else 0.0


def _over_replicas(recipe: Recipe, model: ModelShapes, ranks: Ranks, hardware: Hardware) -> float:
    """Return the seconds to gather, or to reduce, the trained part of one rank's model over its replicas."""
    return _ring(model.gradients, data_ranks(recipe, ranks.world), ranks, hardware, stride=recipe.tensor)


def _ring(whole: float, over: int, ranks: Ranks, hardware: Hardware, *, stride: int = 1) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `whole` bytes over `over` ranks.

    Each of N ranks sends (N - 1) / N of the bytes at the rate of the slowest link. A ring enters and leaves
    each node once. `stride`: distance between the numbers of the ranks in a ring, and the number of rings
    that work at the same time and share a node's network.
    """
    if over == 1:
        return 0.0
    rates, within = [], max(1, ranks.per_node // stride)
    if within > 1:
        rates.append(_within_node(hardware))
    if over > within:
        rates.append(hardware.inter_node * NETWORK_REACHED / min(stride, ranks.per_node))
    return whole * (over - 1) / over / min(rates)


def _optimizer(
    recipe: Recipe, model: ModelShapes, states: States, ranks: Ranks, hardware: Hardware
) -> tuple[float, float]:
    """Return the seconds of the optimizer's update, and of the copies around it."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    cut = [(p, count * updated_by(p, recipe, ranks).numel) for p, count in model.distinct if p.updated]
    numel = sum(own for _, own in cut)
    parameters = sum(own * p.itemsize for p, own in cut)
    kept = states.gpu.optimizer + states.host.optimizer + states.managed + states.nvme
    # The update reads and writes parameters and states, and reads gradients. Clipping reads gradients twice
    # and writes them once; those of `zero1` are whole.
    once = 2 * parameters + 2 * kept + parameters
    clipping = 3 * (model.gradients if recipe.sharding == "zero1" else parameters)
    on_gpu = hardware.gpu.bandwidth * GIGA * MEMORY_REACHED
    if recipe.offload == "none":
        traffic = once * (PLAIN_TRAFFIC if optimizer.temporaries is not None else 1.0) + clipping
        # Assume that paged states are on the host, where paging puts them if the GPU is full.
        return traffic / on_gpu, 2 * states.managed / _pcie(hardware)
    node = HOST_BANDWIDTH / ranks.per_node
    on_host = max(numel / (optimizer.host_rate * hardware.threads), once / node)
    if recipe.offload == "cpu":
        return on_host + clipping / node, 0.0
    files = 2 * states.nvme * ranks.per_node / NVME
    if recipe.gradients_leave:
        return on_host + clipping / node, parameters / _pcie(hardware) + files
    return on_host + clipping / on_gpu, 2 * parameters / _pcie(hardware) + files


def _within_node(hardware: Hardware) -> float:
    """Return the bytes/s from one GPU to another GPU of its node."""
    return hardware.intra_node * (NVLINK_REACHED if hardware.gpu.nvlink else PCIE_RING_REACHED)


def _pcie(hardware: Hardware) -> float:
    """Return the bytes/s of pinned copies in one direction."""
    return hardware.gpu.pcie * GIGA * PCIE_REACHED
