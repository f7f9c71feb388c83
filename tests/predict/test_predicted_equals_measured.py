"""Real ranks send and hold what was predicted: traffic and memory at rest to the byte, the peak of a step within 5 %.

For a Flamingo and an encoder-projector-LM model: drawn backends, strategies, wrap and frozen policies, formats,
prefetching, recomputing, accumulation, sources and offloading. `python -m tests.bench.peaks` draws more.
"""

import pytest

from tests.bench.peaks import draw, results
from tests.parity import sent, wire

pytestmark = pytest.mark.real

NEAR, FAR = 0.05, 0.10
"""At least 95 % of the predicted peaks lie within NEAR of the measured ones, none beyond FAR."""


@pytest.mark.parametrize("ranks, number", [(2, 32), (4, 8)])
def test_traffic_memory_and_peak(ranks, number):
    wrong, far = [], []
    found = results(draw(number, seed=ranks), ranks)
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
