"""Real ranks send and hold what was predicted: traffic and memory at rest to the byte, the peak of a step within 5 %.

For a Flamingo and an encoder-projector-LM model: drawn backends, strategies, wrap and frozen policies, formats,
prefetching, recomputing, accumulation, sources and offloading. `python -m tests.bench.peaks` draws more.
"""

import pytest

from tests.bench.peaks import Case, draw, results
from tests.cover import cover
from tests.parity import sent, wire

pytestmark = pytest.mark.real

NEAR, FAR = 0.05, 0.10
"""At least 95 % of the predicted peaks lie within NEAR of the measured ones, none beyond FAR."""


def few(cases: list[Case]) -> list[Case]:
    """Choose few of the cases in which each choice occurs with each backend that it was drawn with."""
    occurring = {}
    for number, case in enumerate(cases):
        choices = {"model": case.model, "micro_steps": case.micro_steps, "sources": case.sources, **case.fsdp}
        occurring[number] = {(case.fsdp["backend"], field, value) for field, value in choices.items()}
    return [cases[number] for number in cover(occurring)]


@pytest.mark.parametrize("ranks, number", [(2, 32), (4, 8)])
def test_traffic_memory_and_peak(ranks, number):
    check(few(draw(number, seed=ranks)), ranks)


@pytest.mark.extended
@pytest.mark.parametrize("ranks, number", [(2, 32), (4, 8)])
def test_traffic_memory_and_peak_of_all_draws(ranks, number):
    check(draw(number, seed=ranks), ranks)


def check(cases: list[Case], ranks: int) -> None:
    wrong, far = [], []
    number, found = len(cases), results(cases, ranks)
    assert len(found) >= number * 3 // 4
    for result in found:
        cost = result.cost
        predicted = wire(cost.wire, backend=result.plan.backend)
        for row in result.rows:
            if sorted(sent(row, result.plan)) != predicted:
                wrong.append(f"{result.case}: sent {row['wire']}, not {predicted}")
            if row["parameters"] != cost.memory.parameters:
                wrong.append(f"{result.case}: parameters take {row['parameters']}, not {cost.memory.parameters}")
        if abs(result.error) > NEAR:
            far.append(f"{result.error:+.1%} {result.case}: {cost.peak}")
    assert not wrong, "\n".join(wrong)
    assert max(abs(result.error) for result in found) <= FAR, "\n".join(far)
    assert len(far) <= max(1, number // 20), "\n".join(far)
