"""Rounding, and bytes and seconds as people read them."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for b > 0."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return cdiv(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple of ``multiple`` that is at most ``value``."""
    return value // multiple * multiple


def format_bytes(n: int) -> str:
    """Bytes in binary units, two decimals from KiB on: ``512 B``, ``1.50 MiB``."""
    if n < KIB:
        return f"{n} B"
    for unit, size in (("KiB", KIB), ("MiB", MIB)):
        if n < size * 1024:
            return f"{n / size:.2f} {unit}"
    return f"{n / GIB:.2f} GiB"


def format_seconds(s: float) -> str:
    """Seconds to three figures or so: ``350 us``, ``12.5 ms``, ``3.20 s``, ``2 min 05 s``."""
    if s < 1e-3:
        return f"{s * 1e6:.0f} us"
    if s < 1:
        return f"{s * 1e3:.1f} ms"
    if s < 60:
        return f"{s:.2f} s"
    minutes, seconds = divmod(round(s), 60)
    return f"{minutes} min {seconds:02d} s"
