"""Cards: the peak FLOPs per second of GPUs, by the name that torch gives them. Machines and MFU take them from here."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A kind of GPU, with the peaks of its data sheet, without sparsity."""

    name: str
    pattern: str
    """Regular expression of the names that torch.cuda.get_device_name gives it."""
    half: float
    """FLOPs per second of matrix products in bf16 or fp16 that add up in fp32; of cards before Ampere in fp16, since
    they only emulate bf16."""
    fp32: float
    """FLOPs per second in fp32, without TensorFloat-32, as is torch's default."""
    memory: float
    """Bytes per second to and from its memory."""
    source: str
    """The data sheet."""


_NVIDIA = "https://www.nvidia.com/en-us"
_H100 = f"{_NVIDIA}/data-center/h100/"
_BLACKWELL = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"

CARDS = (
    Card("GB200", r"GB200", 2500e12, 80e12, 8.0e12, _BLACKWELL),
    Card("B200", r"\bB200", 2250e12, 75e12, 7.7e12, _BLACKWELL),
    Card("GH200", r"GH200", 989e12, 67e12, 4.0e12, f"{_NVIDIA}/data-center/grace-hopper-superchip/"),
    Card("H200 NVL", r"\bH200 NVL", 835e12, 60e12, 4.8e12, f"{_NVIDIA}/data-center/h200/"),
    Card("H200", r"\bH200\b", 989e12, 67e12, 4.8e12, f"{_NVIDIA}/data-center/h200/"),
    Card("H100 NVL", r"\bH100 NVL", 835e12, 60e12, 3.9e12, _H100),
    Card("H100 PCIe", r"\bH100 PCIe", 756e12, 51e12, 2.0e12, _H100),
    Card("H100", r"\bH100( 80GB HBM3|-SXM5|$)", 989e12, 67e12, 3.35e12, _H100),
    Card("A100 40 GB", r"\bA100-(SXM4|PCIE)-40GB", 312e12, 19.5e12, 1.555e12, f"{_NVIDIA}/data-center/a100/"),
    Card("A100 80 GB PCIe", r"\bA100 80GB PCIe", 312e12, 19.5e12, 1.935e12, f"{_NVIDIA}/data-center/a100/"),
    Card("A100 80 GB", r"\bA100-SXM4?-80GB", 312e12, 19.5e12, 2.0e12, f"{_NVIDIA}/data-center/a100/"),
    Card("L40S", r"\bL40S\b", 362e12, 91.6e12, 0.864e12, f"{_NVIDIA}/data-center/l40s/"),
    Card("L40", r"\bL40\b", 181e12, 90.5e12, 0.864e12, f"{_NVIDIA}/data-center/l40/"),
    Card("L4", r"\bL4\b", 121e12, 30.3e12, 0.3e12, f"{_NVIDIA}/data-center/l4/"),
    Card("A40", r"\bA40\b", 149.7e12, 37.4e12, 0.696e12, f"{_NVIDIA}/data-center/a40/"),
    Card("RTX 4090", r"\bRTX 4090$", 165.2e12, 82.6e12, 1.008e12, _ADA),
    Card("RTX 3090", r"\bRTX 3090$", 71e12, 35.6e12, 0.936e12, _AMPERE),
    Card("V100S", r"\bV100S-PCIE", 130e12, 16.4e12, 1.134e12, _V100),
    Card("V100", r"\bV100-SXM[23]-", 125e12, 15.7e12, 0.9e12, _V100),
    Card("V100 PCIe", r"\bV100-PCIE-", 112e12, 14e12, 0.9e12, _V100),
    Card("T4", r"\bT4$", 65e12, 8.1e12, 0.3e12, f"{_NVIDIA}/data-center/tesla-t4/"),
    Card("MI325X", r"\bMI325X", 1307e12, 163.4e12, 6.0e12, f"{_AMD}/mi300/mi325x.html"),
    Card("MI300X", r"\bMI300X", 1307e12, 163.4e12, 5.3e12, f"{_AMD}/mi300/mi300x.html"),
    Card("MI250X die", r"\bMI250X", 191.5e12, 47.9e12, 1.6e12, f"{_AMD}/mi200/mi250x.html"),
)
"""The first whose pattern is found in a name holds. NVIDIA's data sheets give peaks with sparsity, which are twice
these; an RTX card that adds up in fp32 reaches half of what it reaches in fp16. To torch a MI250X is two devices, one a
die; its fp32 is that of the matrix cores."""


def card_of(name: str) -> Card | None:
    """Return the card of this name, as torch.cuda.get_device_name gives it; None if it is not known.

    A slice of a card (MIG) computes less than the card, and its name does not say how much: it is not known.
    """
    if "MIG" in name:
        return None
    return next((card for card in CARDS if re.search(card.pattern, name)), None)


def peak_of(name: str, *, fp32: bool) -> float | None:
    """Return the peak FLOPs per second of the card of this name; None if it is not known.

    fp32: most of the model computes in fp32, else in bf16 or fp16.
    """
    card = card_of(name)
    if card is None:
        return None
    return card.fp32 if fp32 else card.half
