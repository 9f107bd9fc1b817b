"""What a compiled kernel says of its speed: how wide it loads, how many of it a processor holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxserve.runtime.targets import GpuTarget

_ENTRY = re.compile(r"\.entry (\w+)\s*\((.*?)\)(.*?)\n\}", re.DOTALL)
_STATEMENT = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*?);", re.MULTILINE)
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAM = re.compile(r"\[(\w+_param_\d+)\b")
_ADDRESS = re.compile(r"\[\s*(%[a-z]+\d+)[^\]]*\]")
_VECTOR = re.compile(r"\.v(\d)\.")
_ELEMENT = re.compile(r"\.[a-z]+(\d+)$")
_ASYNC_BYTES = re.compile(r",\s*(0x[0-9a-f]+|\d+)\s*(?:,|$)", re.IGNORECASE)

# Resident programs a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability". The other limits are fields of a target.
_PROGRAMS = {"8.0": 32, "8.9": 24, "9.0": 32}
# Granularities of CUDA's occupancy calculator (cuda_occupancy.h) for 8.x and 9.0.
_REGISTER_UNIT = 256  # registers are handed to a warp in such units
_WARP_UNIT = 4  # and to this many warps at a time, one for each quarter of a multiprocessor
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024  # by the system, in each program


def _entries(ptx: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for name, parameters, body in _ENTRY.findall(ptx):
        yield name, tuple(re.findall(r"(\w+_param_\d+)", parameters)), body


def load_bits(ptx: str, entry: str, parameters: Collection[int]) -> int | None:
    """The narrowest load of global memory through pointers passed as ``parameters``, in bits.

    Follows each pointer from its parameter through the address arithmetic of the kernel ``entry``;
    a value loaded from memory is followed no further. None: nothing is loaded through them. Raises
    ValueError without such a kernel.
    """
    for name, names, body in _entries(ptx):
        if name == entry:
            wanted = {names[i] for i in parameters}
            return min(_widths(_STATEMENT.findall(body), wanted), default=None)
    raise ValueError(f"no kernel {entry} in {len(ptx)} characters of PTX")


def _widths(statements: list[tuple[str, str]], wanted: set[str]) -> Iterator[int]:
    pointers = _pointers(statements, wanted)
    for op, operands in statements:
        if op.startswith(("ld.global", "ld.b", "ld.u", "ld.v")):
            address = _ADDRESS.findall(operands)[-1:]
        elif op.startswith("cp.async.") and ".shared" in op and "bulk" not in op:
            address = _ADDRESS.findall(operands)[1:2]
        else:
            continue
        if address and address[0] in pointers:
            yield _bits(op, operands)


def _pointers(statements: list[tuple[str, str]], wanted: set[str]) -> set[str]:
    """Registers that hold an address derived from one of the parameters ``wanted``."""
    found: set[str] = set()
    edges: list[tuple[str, set[str]]] = []
    for op, operands in statements:
        target, _, rest = operands.partition(",")
        registers = _REGISTER.findall(target)
        if op.startswith("ld.param"):
            parameter = _PARAM.search(rest)
            if parameter and parameter[1] in wanted:
                found.update(registers)
        elif not op.startswith(("ld.", "st.", "cp.", "atom.")) and len(registers) == 1:
            edges.append((registers[0], set(_REGISTER.findall(rest))))
    grew = True
    while grew:  # a loop's registers are written after they are read
        grew = False
        for register, sources in edges:
            if register not in found and not found.isdisjoint(sources):
                found.add(register)
                grew = True
    return found


def _bits(op: str, operands: str) -> int:
    if op.startswith("cp.async."):
        after = operands[operands.rindex("]") + 1 :]
        size = _ASYNC_BYTES.match(after)
        assert size is not None, operands  # PTX requires it
        return 8 * int(size[1], 0)
    element, vector = _ELEMENT.search(op), _VECTOR.search(op)
    assert element is not None, op
    return int(element[1]) * (int(vector[1]) if vector else 1)


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor holds at once."""

    programs: int
    threads: int
    registers: int
    shared_bytes: int


def limits(target: GpuTarget) -> Limits:
    """The limits of a target; raises KeyError for an architecture without a row above."""

    def field(name: str) -> int:
        found = re.search(rf"^\s*{name}:\s*(\d+)", target.text, re.MULTILINE)
        assert found is not None, name  # the packaged targets have it
        return int(found[1])

    capability = re.search(
        r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))? \}", target.text
    )
    assert capability is not None
    return Limits(
        programs=_PROGRAMS[f"{capability[1]}.{capability[2] or 0}"],
        threads=field("threads_per_core_limit"),
        registers=field("registers_per_core_limit"),
        shared_bytes=field("shared_memory_per_core"),
    )


def resident_programs(limit: Limits, threads: int, registers: int, shared_bytes: int) -> int:
    """Programs of one kernel that a multiprocessor holds, as CUDA's occupancy calculator counts.

    ``registers`` are those of a thread, ``shared_bytes`` static and dynamic together.
    """
    warps = -(-threads // 32)
    warp_registers = _ceil(registers * 32, _REGISTER_UNIT)
    room = limit.registers // warp_registers // _WARP_UNIT * _WARP_UNIT
    return min(
        limit.programs,
        limit.threads // (warps * 32),
        room // warps,
        limit.shared_bytes // _ceil(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT),
    )


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit
