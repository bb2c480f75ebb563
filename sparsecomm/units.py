"""Numbers with units, as people write them."""

from __future__ import annotations

import math
import re

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BANDWIDTHS = {f"{p}{bit}": scale for p, scale in _PREFIXES.items() for bit in ("bit", "bps")}
_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_count(text: str) -> int:
    """Reads a whole number such as ``14728266``, ``14.7M`` or ``1.5B``; 1k is 1000."""
    return round(_parse(text, _COUNTS, "a number such as 14728266 or 14.7M"))


def parse_bandwidth(text: str) -> float:
    """Reads bits per second, such as ``25gbit`` or ``25Gbps``."""
    if re.search("B[pP]", text):
        raise ValueError(f"{text!r} may mean bytes per second; write bits, such as 25gbit")
    value = _parse(text, _BANDWIDTHS, "a bandwidth such as 25gbit or 100mbit")
    if value == 0:
        raise ValueError(f"{text!r}: nothing crosses a link without bandwidth")
    return value


def parse_bytes(text: str) -> int:
    """Reads a size, such as ``25MB`` or ``25MiB``; 1 kB is 1000 bytes, 1 KiB 1024."""
    what = "a size such as 25MB or 25MiB"
    if "/" in text:
        raise ValueError(f"{text!r} is not {what}")
    size = round(_parse(text, _BYTES, what))
    if size == 0:
        raise ValueError(f"{text!r} is no size: nothing fits into it")
    return size


def parse_seconds(text: str) -> float:
    """Reads a time, such as ``20us``."""
    return _parse(text, _TIMES, "a time such as 20us or 1.5ms")


def format_seconds(seconds: float) -> str:
    """Three digits and the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _parse(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*?)(?:/s)?\s*", text.lower())
    try:
        if match is None or match[2] not in units:
            raise ValueError
        value = float(match[1]) * units[match[2]]
    except ValueError:
        raise ValueError(f"{text!r} is not {what}") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not {what}")
    return value
