"""The machines that plans are laid on: what their GPUs compute, hold and send, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..params import ParamError, RunParams
from ..params.in_words import size
from ..params.run import read_cluster
from .cards import CARDS

WORKSPACE = 96 << 20
"""Bytes that cuBLAS takes from torch's allocator for its own use, and the prediction lacks: on Hopper torch gives each
handle 32 MiB (CUDABlas.cpp), and forward, backward and cublasLt may have one each. Other GPUs take less."""


@dataclass(frozen=True)
class Machine:
    """The hardware of the ranks and their network; peak figures of data sheets, or measured ones."""

    flops: float
    """FLOPs per second and rank, in the compute format."""
    memory: float
    """Bytes per second and rank, to and from its memory."""
    bandwidth: float
    """Bytes per second that a rank sends; to other nodes, where `inside` is given."""
    latency: float = 2e-5
    """Seconds before a collective begins to move anything; as much again each time that its nodes double."""
    efficiency: float = 0.4
    """Share of `flops` that a step reaches on the whole, where only parameters and tokens are known."""
    inside: float = 0.0
    """Bytes per second that a rank sends within its node; 0: as to other nodes."""
    gpus_per_node: int = 8
    """Ranks of a node."""
    capacity: float = 79.1 * 2**30
    """Bytes of memory that a rank has, as torch reports them: less than a data sheet says."""
    fp32: float = 0.0
    """FLOPs per second and rank, where most of a model computes in fp32; 0: as `flops`."""
    products: float = 0.0
    """Share of `flops` that the largest matrix products reach, for a plan made with an example; 0: `efficiency`."""
    attention: float = 0.0
    """Share of `flops` that fused attention reaches; 0: `products`."""
    launch: float = 0.0
    """Seconds in which the host launches one operator: a step of many small ones takes at least that."""
    spread: float = 1.0
    """Greatest ratio of a step's seconds to those of its kernels at their best, for a plan made with an example."""
    products_factor: float = 1.0
    """Usual ratio of the seconds of products and attention to those at their best rates."""
    bytes_factor: float = 1.0
    """Usual ratio of the seconds of all other operators to those of their bytes at `memory`."""
    operator: float = 0.0
    """Usual seconds that each operator takes beyond its bytes or products; 0: no number beside the range."""
    context: float = 0.0
    """Bytes of a GPU that torch's allocator does not see: CUDA's context and kernels, NCCL's buffers."""
    fragmentation: float = 0.0
    """Share of the peak that the allocator reserves beyond it: gaps, and blocks that are larger than what is asked."""
    name: str = "given"

    def needed_bytes(self, peak: int) -> int:
        """Return the bytes that must be free on a GPU for a peak of so many in tensors."""
        workspace = WORKSPACE if self.context else 0
        return int((peak + workspace) * (1 + self.fragmentation) + self.context)

    @property
    def margin(self) -> str:
        """The memory that must be free on a GPU beyond the peak of its tensors, in words."""
        return f"{self.fragmentation:.0%} and {size(self.needed_bytes(0))}"


CONTEXT, FRAGMENTATION = 1.5e9, 0.15
"""Memory of a GPU beyond the tensors' peak. NCCL took 0.5 to 0.7 GB for a group of 2 to 4 ranks (NVIDIA/nccl, issue
964), CUDA's context takes some 0.5 GB. Published runs reserved 12 to 24 % more than they allocated, without
expandable segments (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md)."""

LAUNCH, SPREAD = 8e-6, 1.6
"""Seconds to launch an operator in eager mode, and how many times as long as its kernels at their best a step may take:
clocks fall under load, kernels of other shapes are slower, and collectives take a share of the GPU. On an H200 kernels
took 1.4 times as long as at their best, and the GPU waited 8 to 15 microseconds for each operator of small steps
(notebooks/reference/gpu.md)."""
USUAL = {"products_factor": 1.25, "bytes_factor": 1.6, "operator": 14e-6}
"""The usual time of an eager step, beside the range: from the operators of five steps on an H200
(notebooks/reference/gpu.md). Published steps were held out; notebooks/reference/published.md has the errors."""


def _of_card(name: str, *, gib: float, products: float, attention: float) -> Machine:
    """Return a machine with the peaks of a card of cards.py, as much memory as torch reports, and its kernels' shares.

    It has no network yet.
    """
    card = next(card for card in CARDS if card.name == name)
    machine = Machine(flops=card.half, fp32=card.fp32, memory=card.memory, bandwidth=0.0, capacity=gib * 2**30)
    kernels = {"products": products, "attention": attention, "launch": LAUNCH, "spread": SPREAD, **USUAL}
    return replace(machine, **kernels, context=CONTEXT, fragmentation=FRAGMENTATION)  # type: ignore[arg-type]


# Memory: torch's out-of-memory messages name 79.1 to 79.3 GiB on cards of 80 GB, 139.8 on a H200, 94.5 on a GH200 with
# 96 GB, 178.3 on a B200, 39.4 to 39.5 on an A100 of 40 GB, 44.4 on a L40S, 23.6 to 23.7 on cards of 24 GB, 191.7 to
# 192.0 on a MI300X and 64.0 on a die of a MI250X.
# Matrix products: the best of many shapes, of the data sheet's peak (stas00/ml-engineering,
# compute/accelerator/README.md, August 2026): 80.3 % on H100 and H200, 83.8 % on a GH200 of 900 W, 77.6 % on the B200,
# 86.9 % on the A100, 51.4 % on the MI300X.
# Attention: FlashAttention-2, 35 % on the H100 (Shah et al. 2024, FlashAttention-3), 63 to 73 % on the A100 (Dao 2023).
# Without a figure of others, later cards are taken to be as the H100, L40S and RTX 4090 as the A100, and the MI250X as
# the MI300X.
_H100 = _of_card("H100", gib=79.1, products=0.80, attention=0.35)
_H200 = _of_card("H200", gib=139.8, products=0.80, attention=0.35)
_GH200 = _of_card("GH200", gib=94.5, products=0.80, attention=0.35)
_B200 = _of_card("B200", gib=178.3, products=0.776, attention=0.35)
_A100 = _of_card("A100 80 GB", gib=79.1, products=0.87, attention=0.65)
_A100_40 = _of_card("A100 40 GB", gib=39.4, products=0.87, attention=0.65)
_L40S = _of_card("L40S", gib=44.4, products=0.87, attention=0.65)
_RTX4090 = _of_card("RTX 4090", gib=23.6, products=0.87, attention=0.65)
_MI300X = _of_card("MI300X", gib=191.7, products=0.51, attention=0.35)
_MI250X = _of_card("MI250X die", gib=63.9, products=0.51, attention=0.35)

# Within a node: the rate of NCCL's ring. 360 GB/s of 450 on H100s (NVIDIA/nccl-tests, issue 326); 365 on H200s, 682 of
# 900 on B200s, and 313 of 448 on MI300Xs (stas00/ml-engineering, network/README.md); about 200 of 300 on A100s
# (NVIDIA/nccl-tests, issue 149). GH200s in nodes of four have as many links as H100s, and are taken to reach as much.
# The dies of MI250Xs are joined by single links of 50 GB/s, the narrowest of a ring.
# To other nodes: a card of 400 Gb/s InfiniBand for each H100, H200, B200 and MI300X; of 200 Gb/s for each A100 and
# GH200 (JUPITER); 25 Gb/s Ethernet for each GPU; 200 Gb/s Slingshot for each MI250X, of two dies (LUMI, Frontier).
_ONE_NODE = {
    "h100": replace(_H100, bandwidth=360e9),
    "h200": replace(_H200, bandwidth=365e9),
    "gh200": replace(_GH200, bandwidth=360e9, gpus_per_node=4),
    "b200": replace(_B200, bandwidth=682e9),
    "a100": replace(_A100, bandwidth=210e9),
    "a100-40": replace(_A100_40, bandwidth=210e9),
    "mi300x": replace(_MI300X, bandwidth=313e9),
    "mi250x": replace(_MI250X, bandwidth=50e9),
}
"""Machines by their GPU, for ranks in one node, with the rate within it."""


def _across(gpu: str, network: str, bandwidth: float, *, latency: float = 3e-5) -> Machine:
    """Return a machine of several nodes with such a network, whose ranks send so many bytes per second."""
    inside = _ONE_NODE[gpu]
    return replace(inside, inside=inside.bandwidth, bandwidth=bandwidth, latency=latency, name=f"{gpu}-{network}")


_MACHINES = (
    replace(_ONE_NODE["h100"], name="h100-nvlink"),
    _across("h100", "infiniband", 50e9),
    replace(_ONE_NODE["h200"], name="h200-nvlink"),
    _across("h200", "infiniband", 50e9),
    replace(_ONE_NODE["gh200"], name="gh200-nvlink"),
    _across("gh200", "infiniband", 25e9),
    replace(_ONE_NODE["b200"], name="b200-nvlink"),
    _across("b200", "infiniband", 50e9),
    replace(_ONE_NODE["a100"], name="a100-nvlink"),
    _across("a100", "infiniband", 25e9),
    _across("a100", "ethernet", 3.1e9, latency=1e-4),
    replace(_ONE_NODE["a100-40"], name="a100-40-nvlink"),
    _across("a100-40", "infiniband", 25e9),
    replace(_L40S, bandwidth=25e9, latency=3e-5, name="l40s-pcie"),
    replace(_RTX4090, bandwidth=25e9, latency=3e-5, name="rtx4090-pcie"),
    replace(_ONE_NODE["mi300x"], name="mi300x-xgmi"),
    _across("mi300x", "infiniband", 50e9),
    replace(_ONE_NODE["mi250x"], name="mi250x-xgmi"),
    _across("mi250x", "slingshot", 12.5e9),
)
MACHINES = {machine.name: machine for machine in _MACHINES}
"""GPUs (bf16; fp32 without TensorFloat-32, as is torch's default) and networks by name, from the data sheets of
cards.py and the figures above. To torch, and here, each die of a MI250X is a GPU. No CPU is among them: its small
operators take as long to call as to run, and a prediction from rates was off by 3 to 5 times."""

LAPTOP = "laptop"
"""A machine without GPUs: its ranks share LAPTOP_BYTES, and no seconds are predicted."""
LAPTOP_BYTES = 16 << 30


def machine_of(name: str, figures: Mapping[str, float] | None = None) -> Machine:
    """Return one of MACHINES, some of its figures replaced. Raises ParamError for other names."""
    if name not in MACHINES:
        raise ParamError("machine", f"{name!r} is not one of {', '.join(MACHINES)}; or give a Machine")
    check_figures(figures or {})
    return replace(MACHINES[name], **dict(figures or {}))  # type: ignore[arg-type]


def gpu_with(gib: float) -> Machine:
    """Return a GPU of which only the memory is known, in GiB as torch reports it: enough to say what fits."""
    figures = {"flops": 0.0, "memory": 0.0, "bandwidth": 0.0, "context": CONTEXT, "fragmentation": FRAGMENTATION}
    return Machine(**figures, capacity=gib * 2**30, name=f"a GPU with {gib:g} GiB")  # type: ignore[arg-type]


def check_figures(figures: Mapping[str, float]) -> None:
    """Raise ParamError for a key that is not a figure of a machine."""
    known = [f.name for f in fields(Machine) if f.name != "name"]
    for key in figures:
        if key not in known:
            raise ParamError("machine", f"{key!r} is not one of its figures, {', '.join(known)}")


def machine_of_run(name: str, params: RunParams) -> Machine:
    """Return one of MACHINES; figures of the run's cluster, where its profile has any, come first."""
    return machine_of(name, read_cluster(params.launch.cluster).machine if params.launch.cluster else {})
