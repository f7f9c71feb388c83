"""Cards by the names that torch gives them; each name here was seen in a log or an issue of others, or on a machine."""

import pytest

from mmfsdp.predict import MACHINES
from mmfsdp.predict.cards import CARDS, card_of, peak_of

NAMES = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM3-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100S-PCIE-32GB": 130e12,
    "AMD Instinct MI300X": 1307e12,
    "AMD Instinct MI325X": 1307e12,
    "AMD Instinct MI250X": 191.5e12,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_known_by_its_name(name):
    assert peak_of(name, fp32=False) == NAMES[name]
    assert 0 < peak_of(name, fp32=True) < NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice computes less than the card
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM-64GB",  # made for one center, with more processors
        "NVIDIA H20",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA T400 4GB",
        "Tesla V100-DGXS-32GB",
        "CPU",
        "",
    ],
)
def test_no_peak_is_better_than_a_wrong_one(name):
    assert card_of(name) is None and peak_of(name, fp32=False) is None


def test_each_card_is_reached_by_a_name_and_has_a_source():
    assert {card_of(name).name for name in NAMES} == {card.name for card in CARDS}
    for card in CARDS:
        assert card.source.startswith("https://") and card.fp32 < card.half and card.memory < 1e13


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_the_peaks_of_a_card(name):
    machine = MACHINES[name]
    peaks = {(card.half, card.fp32, card.memory) for card in CARDS}
    assert (machine.flops, machine.fp32, machine.memory) in peaks and machine.name == name
    # A machine of one node has no `inside`; in all others the links within a node are faster than those between nodes.
    assert not machine.inside or machine.bandwidth < machine.inside
    assert machine.inside or name.endswith(("-nvlink", "-xgmi", "-pcie"))
    assert 0 < machine.products < 1 and 0 < machine.attention < 1 and machine.capacity > 20 * 2**30
