"""Ways in which a file can be damaged, drawn by hypothesis."""

import json

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

ODD = [
    None,
    True,
    -1,
    0,
    3.5,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [1],
    {},
    {"a": {}},
    [[None]],
    "\x1b[31m",
]
JUNK = (
    b"",
    b"[1, 2]\n",
    b"\xff\xfe\x00",
    b'{"a": 1}\n',
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"x" * 5_000_000,
    b"NaN\n" * 9,
)
WAYS = ("junk", "missing", "folder", "cut", "flip", "insert", "value")


@st.composite
def ruins(draw, names):
    """One of these files, what is wrong with it, and what that takes."""
    name, way = draw(st.sampled_from(names)), draw(st.sampled_from(WAYS))
    at, byte = draw(st.integers(0, 2000)), draw(st.binary(min_size=1, max_size=3) | st.sampled_from(JUNK))
    return name, way, at, byte, draw(st.sampled_from(ODD))


def ruin(path, way, at, byte, odd):
    """Damage a file."""
    data = path.read_bytes()
    at %= len(data) or 1
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "value":
        path.write_bytes(with_value(data, at, odd) if path.suffix in (".json", ".jsonl") else repr(odd).encode())
    elif way != "missing":
        cut = {"cut": data[:at], "flip": data[:at] + byte[:1] + data[at + 1 :], "insert": data[:at] + byte + data[at:]}
        path.write_bytes(cut.get(way, byte if way == "junk" else data))


def with_value(data, at, odd):
    """JSON lines, or one JSON object, with the at-th of all their values replaced."""
    whole = [json.loads(data)] if data.startswith(b"{\n") else [json.loads(line) for line in data.splitlines()]
    places = [(one, key) for row in whole for one, key in values_in(row)]
    place, key = places[at % len(places)]
    place[key] = odd
    return "".join(json.dumps(row) + "\n" for row in whole).encode()


def values_in(place):
    for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
        yield place, key
        if isinstance(value, (dict, list)):
            yield from values_in(value)


def always(number):
    """So many cases, the same at each run; a failure is shown as it is, since to make it smaller takes minutes."""
    few = settings(max_examples=number, phases=[Phase.generate], derandomize=True, database=None, deadline=None)
    return settings(few, suppress_health_check=list(HealthCheck))
