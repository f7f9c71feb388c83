"""The machines that plans are laid on: what their GPUs compute, hold and send, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..params import ParamError, RunParams
from ..params.numbers import size
from ..params.run import read_cluster

WORKSPACE = 96 << 20
"""Bytes that cuBLAS takes from torch's allocator for its own use, and the prediction lacks: on Hopper torch gives each
handle 32 MiB (CUDABlas.cpp), and forward, backward and cublasLt may have one each. Other GPUs take less."""


@dataclass(frozen=True)
class Machine:
    """The hardware of the ranks and their network; peak figures of data sheets, or measured ones."""

    flops: float
    """Per second and rank, in the compute format."""
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
    """Per second and rank, where most of a model computes in fp32; 0: `flops`."""
    products: float = 0.0
    """Share of `flops` that the largest matrix products reach, for a plan made with an example; 0: `efficiency`."""
    attention: float = 0.0
    """Share of `flops` that fused attention reaches; 0: `products`."""
    launch: float = 0.0
    """Seconds in which the host launches one operator: a step of many small ones takes at least that."""
    spread: float = 1.0
    """How many times as long a step may take as its kernels at their best, for a plan made with an example."""
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
"""What a GPU needs beyond the tensors' peak. NCCL took 0.5 to 0.7 GB for a group of 2 to 4 ranks (NVIDIA/nccl, issue
964), CUDA's context takes some 0.5 GB. Published runs reserved 12 to 24 % more than they allocated, without
expandable segments (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md)."""

_H100 = Machine(flops=989e12, fp32=67e12, memory=3.35e12, bandwidth=360e9)
_A100 = Machine(flops=312e12, fp32=19.5e12, memory=2.0e12, bandwidth=210e9)
_RTX4090 = Machine(flops=165e12, fp32=82.6e12, memory=1.0e12, bandwidth=25e9, capacity=23.6 * 2**30)
_MACHINES = (
    replace(_H100, name="h100-nvlink"),
    replace(_H100, bandwidth=50e9, latency=3e-5, inside=360e9, name="h100-infiniband"),
    replace(_A100, name="a100-nvlink"),
    replace(_A100, bandwidth=25e9, latency=3e-5, inside=210e9, name="a100-infiniband"),
    replace(_A100, bandwidth=3.1e9, latency=1e-4, inside=210e9, name="a100-ethernet"),
    replace(_RTX4090, latency=3e-5, name="rtx4090-pcie"),
)
# Memory: out-of-memory messages of torch name 79.1 to 79.3 GiB on cards of 80 GB, 23.6 to 23.7 on cards of 24 GB.
# Matrix products: the best of many shapes, 794.5 of 989 and 271.2 of 312 TFLOP/s (stas00/ml-engineering,
# compute/accelerator/README.md). Attention: FlashAttention-2, 35 % on the H100 (Shah et al. 2024, FlashAttention-3) and
# 63 to 73 % on the A100 (Dao 2023). The RTX 4090 is assumed to be as the A100.
_H100_PRODUCTS, _H100_ATTENTION = 0.80, 0.35
_A100_PRODUCTS, _A100_ATTENTION = 0.87, 0.65
LAUNCH, SPREAD = 8e-6, 1.6
"""Seconds to launch an operator in eager mode, and how many times as long as its kernels at their best a step may take:
clocks fall under load, kernels of other shapes are slower, collectives take a share of the GPU, and gaps are left."""


def _with_kernels(machine: Machine) -> Machine:
    """Return the machine with what its kernels reach and what must be free."""
    machine = replace(machine, launch=LAUNCH, spread=SPREAD, context=CONTEXT, fragmentation=FRAGMENTATION)
    if machine.name.startswith("h100"):
        return replace(machine, products=_H100_PRODUCTS, attention=_H100_ATTENTION)
    return replace(machine, products=_A100_PRODUCTS, attention=_A100_ATTENTION)


MACHINES = {machine.name: _with_kernels(machine) for machine in _MACHINES}
"""GPUs (bf16; fp32 without TensorFloat-32, as is torch's default) and networks by name: NVLink within a node at the
rate that NCCL reaches (NVIDIA/nccl-tests, issue 326: 360 GB/s of 450 on H100s; issue 149: about 200 of 300 on A100s),
a card of 400 (H100) or 200 Gb/s InfiniBand per GPU, 25 Gb/s Ethernet per GPU. No CPU is among them: its small
operators take as long to call as to run, and a prediction from rates was off by 3 to 5 times."""

LAPTOP = "laptop"
"""A machine without GPUs: its ranks share LAPTOP_BYTES, and no seconds are predicted."""
LAPTOP_BYTES = 16 << 30


def machine_of(name: str, figures: Mapping[str, float] | None = None) -> Machine:
    """Return one of MACHINES, some of its figures replaced. Raises ParamError for other names."""
    if name not in MACHINES:
        raise ParamError("machine", f"{name!r} is not one of {', '.join(MACHINES)}; or give a Machine")
    known = [f.name for f in fields(Machine) if f.name != "name"]
    for key in figures or {}:
        if key not in known:
            raise ParamError("machine", f"{key!r} is not one of its figures, {', '.join(known)}")
    return replace(MACHINES[name], **dict(figures or {}))  # type: ignore[arg-type]


def machine_of_run(name: str, params: RunParams) -> Machine:
    """Return one of MACHINES; figures of the run's cluster, where its profile has any, come first."""
    return machine_of(name, read_cluster(params.launch.cluster).machine if params.launch.cluster else {})
