"""What a compiled program's text says of its instructions: what they compute, what they copy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_WEIGHT = re.compile(r"^params_(?:layers_\d+__)?(\w+?)(?:\.\d+)?$")
# They name a place in memory and move nothing.
_SILENT = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "conditional"}
_IN_PLACE = {"scatter", "dynamic-update-slice"}
# What says nothing of a fusion's purpose.
_PLUMBING = {
    *("broadcast_in_dim", "reshape", "convert_element_type", "slice", "squeeze", "transpose"),
    *("select_n", "lt", "le", "ge", "gt", "eq", "ne", "and", "or", "iota", "rem", "div", "sign"),
    *("reduce_sum", "jit(floor_divide)", "jit(remainder)", "concatenate", "split"),
}

Array = tuple[str, tuple[int, ...]]
"""A dtype as XLA spells it, and sorted sides without ones: a transposed array is the same one."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    op: str
    rest: str


def array(dtype: str, shape: Collection[int]) -> Array:
    """The key by which arrays are compared."""
    return dtype, tuple(sorted(n for n in shape if n != 1))


class Program:
    """The optimised HLO of a GPU executable, as ``Compiled.as_text`` prints it."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        current: list[_Instruction] = []
        for line in text.splitlines():
            if (opens := _COMPUTATION.match(line)) is not None:
                current = self._computations.setdefault(opens[1], [])
            elif (found := _INSTRUCTION.match(line)) is not None:
                current.append(_Instruction(*found.groups()))
        # By either spelling: a kernel's name has no dots.
        self._by_name = {
            name: i
            for body in self._computations.values()
            for i in body
            for name in (i.name, i.name.replace(".", "_"))
        }

    def copies(self, arrays: Collection[Array]) -> list[str]:
        """Instructions that write a new array like one of ``arrays``.

        Not counted are those that update one in place (scatters, slice updates, custom calls):
        whether they do is for the executable's workspace to say.
        """
        fused = {name for i in self._by_name.values() if (name := _called(i)) is not None}
        return [
            i.name
            for computation, body in self._computations.items()
            if computation not in fused
            for i in body
            if i.op not in _SILENT
            and i.op != "custom-call"
            and not self._updates_in_place(i)
            and any(
                array(dtype, _sides(sides)) in arrays for dtype, sides in _ARRAY.findall(i.result)
            )
        ]

    def describe(self, name: str) -> str:
        """The operations an instruction computes, then the weights it reads."""
        instruction = self._by_name.get(name)
        if instruction is None:
            return ""
        body = self._computations.get(_called(instruction) or "", [])
        names = [op for i in (*body, instruction) for op in _OP_NAME.findall(i.rest)]
        last = [op.rsplit("/", 1)[-1] for op in names]
        said = list(dict.fromkeys(op for op in last if op not in _PLUMBING)) or last[-1:]
        return " ".join((*said, *self._weights(instruction)))

    def _weights(self, instruction: _Instruction) -> Iterator[str]:
        for operand in _OPERAND.findall(instruction.rest.split("),", 1)[0]):
            source = self._by_name.get(operand)
            while source is not None and source.op == "bitcast":
                source = self._by_name.get(_OPERAND.findall(source.rest)[0])
            weight = _WEIGHT.match(source.name) if source is not None else None
            if weight is not None:
                yield f"[{weight[1]}]"

    def _updates_in_place(self, instruction: _Instruction) -> bool:
        body = self._computations.get(_called(instruction) or "", [instruction])
        return any(i.op in _IN_PLACE for i in body)


def _called(instruction: _Instruction) -> str | None:
    if instruction.op not in ("fusion", "call", "reduce", "scatter", "sort", "reduce-window"):
        return None
    found = re.search(r"(?:calls|to_apply)=%([\w.-]+)", instruction.rest)
    return found[1] if found else None


def _sides(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
