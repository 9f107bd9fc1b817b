"""JSON documents with one thing wrong, wherever that is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# What a careless reader trips over: sizes beyond every machine word, and the wrong type.
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**31, 2**32 - 1, 2**63, 2**64, 10**30, 1e300),
    *("", "a", "\0", "../../etc/passwd", "/etc/passwd", "é\n", "x" * 5000, "(a+)+$", "{{", "{% if"),
    *([], {}, [[]], [1], ["a"], [None], {"a": 1}, {"type": "a"}, {"content": 1}),
]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside ``value`` with each of its keys."""
    keys = range(len(value)) if isinstance(value, list) else list(value)
    for key in keys:
        yield value, key
        if isinstance(value[key], list | dict):
            yield from _places(value[key])


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A copy with one value replaced, left out, said twice, or under another name."""
    changed = copy.deepcopy(document)
    container, key = draw(st.sampled_from(list(_places(changed))))
    how = draw(st.sampled_from(["replace", "replace", "drop", "double", "rename"]))
    if how == "replace":
        container[key] = draw(st.sampled_from(VALUES))
    elif how == "drop":
        del container[key]
    elif isinstance(container, list):
        container.append(container[key])
    elif how == "double":
        container[key] = [container[key], container[key]]
    else:
        container[draw(st.sampled_from(["", "a", "type", "\0"]))] = container.pop(key)
    return changed
