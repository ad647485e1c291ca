"""Numbers as people write them: ``100M`` parameters, ``10gbit``, ``50us``, ``100MB``."""

from __future__ import annotations

import math
import re

from ..core.errors import SettingsError, explain

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*", re.S)
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "bn": 1e9, "g": 1e9, "t": 1e12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_RATE = re.compile(r"([kmgt]i?)?(bits?|b|bytes?)?(?:/s|ps|/sec)?", re.IGNORECASE)


def count(text: str, option: str) -> int:
    """Return a whole number of things: ``100e6``, ``100M``, ``1.5B``, ``25_000_000``.

    Args:
        text: What was written.
        option: For the message.

    Raises:
        SettingsError: It is no such number, or not above 0.
    """
    number, unit = _split(text)
    scale = _COUNTS.get(unit.lower())
    if number is None or scale is None or not 1 <= number * scale <= 1e15:
        raise _bad(option, text, "a number such as 100e6, 25_000_000, 100M or 1.5B, at most 1e15")
    return round(number * scale)


def bandwidth(text: str, option: str) -> float:
    """Return bytes a second: ``10gbit``, ``100 Mbit/s``, ``10Gb/s``, ``1.25GB/s``.

    A small b is a bit and a capital B a byte.

    Raises:
        SettingsError: It is no such number, has no unit, or is not above 0.
    """
    number, unit = _split(text)
    found = _RATE.fullmatch(unit)
    kind = (found[2] or "") if found else ""
    if number is None or not found or not kind or not number > 0:
        raise _bad(option, text, "a number and a unit such as 10gbit, 100Mb/s or 1.25GB/s")
    bits = kind == "b" or kind.lower().startswith("bit")
    return number * _PREFIXES[(found[1] or "").lower()] / (8 if bits else 1)


def duration(text: str, option: str) -> float:
    """Return seconds: ``50us``, ``0.2ms``, ``1s``; a plain 0 needs no unit.

    Raises:
        SettingsError: It is no such number, or has no unit.
    """
    number, unit = _split(text)
    scale = 1.0 if number == 0 and not unit else _TIMES.get(unit.lower())
    if number is None or scale is None:
        raise _bad(option, text, "a number and a unit such as 50us, 0.2ms or 1s")
    return number * scale


def shape(text: str, option: str) -> tuple[int, ...]:
    """Return the shape of a tensor: ``1024x1024``.

    Raises:
        SettingsError: It is no such shape.
    """
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise _bad(option, text, "a shape such as 1024x1024")
    return tuple(map(int, parts))


def show_bytes(nbytes: float) -> str:
    """Return a number of bytes with a decimal unit: ``400 MB``."""
    return _scaled(nbytes, "B")


def show_rate(rate: float) -> str:
    """Return bytes a second in bits, as networks are named: ``10 Gbit/s``."""
    return _scaled(8 * rate, "bit/s")


def _scaled(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _split(text: str) -> tuple[float | None, str]:
    found = _NUMBER.fullmatch(text)
    if not found:
        return None, ""
    number = float(found[1].replace("_", "").replace(",", ""))
    return (number, found[2]) if math.isfinite(number) else (None, "")


def _bad(option: str, text: str, expected: str) -> SettingsError:
    return SettingsError(explain(got=f"{option} {text!r}", expected=expected))
