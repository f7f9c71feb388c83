"""Lines through two recordings give what a step of another size holds, corners and loops included."""

import random

from mmfsdp.core.plan import MemoryEvent
from mmfsdp.predict.levels import Levels
from mmfsdp.predict.lines import Lines
from mmfsdp.predict.memory_events import Recording
from mmfsdp.predict.work import Work


def program(generator: random.Random):
    """Return a step, by its size: operators, some of them in a loop with more rounds in a larger step."""
    before, body, after = ([(object(), *coefficients(generator)) for _ in range(k)] for k in (4, 3, 4))
    rounds, growth = generator.randint(1, 3), generator.randint(0, 50)

    def step(n: int) -> Recording:
        levels = Levels()
        for operator, base, slope in before:
            levels.add(operator, base + slope * n, base)
        for i in range(rounds * n):
            for operator, base, slope in body:
                levels.add(operator, base + slope * n + growth * i, base)
        for operator, base, slope in after:
            levels.add(operator, base + slope * n, base)
        event = MemoryEvent("end", 0, *levels.end(), allocated=slope * n, grads=0)
        return Recording((event,), levels, Work(), 0, (), frozenset(), frozenset(), False, frozenset())

    return step


def coefficients(generator: random.Random) -> tuple[int, int]:
    return generator.choice([0, 10_000, 50_000]), generator.choice([0, 10, 700])


def test_a_peak_is_the_largest_of_lines_through_what_each_operator_held():
    generator, corners = random.Random(0), 0
    for _ in range(100):
        step = program(generator)
        first, second = step(2), step(4)
        assert Lines(2, first, 4, second).at(300) == step(300).memory_events
        (low,), (high,) = first.memory_events, second.memory_events
        corners += high.peak + (high.peak - low.peak) * 148 != step(300).memory_events[0].peak
    assert corners > 20, "one line through both peaks would do"
