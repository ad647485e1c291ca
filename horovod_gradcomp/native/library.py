"""Finding and loading the compiled library, and saying why there is none."""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from .structs import DecodeCall, EncodeCall

SWITCH = "HOROVOD_GRADCOMP_NATIVE"
"""Environment variable: "0" turns the kernels off, the name of a level chooses that one."""

_HERE = Path(__file__).parent
_Address = ctypes.c_void_p
_Long = ctypes.c_int64
_Word = ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gradcomp_use": (ctypes.c_char_p, [ctypes.c_char_p]),
    "gradcomp_find": (ctypes.c_int, [ctypes.c_char_p]),
    "gradcomp_sizes": (ctypes.c_int, []),
    "gradcomp_encode": (ctypes.c_int, [ctypes.POINTER(EncodeCall)]),
    "gradcomp_decode": (ctypes.c_int, [ctypes.POINTER(DecodeCall)]),
    "gradcomp_largest": (None, [_Address, _Long, _Long, _Long, _Long, _Address]),
    "gradcomp_above": (None, [_Address, _Long, ctypes.c_int32, _Long, _Long, _Long, _Address]),
    "gradcomp_words": (None, [_Word, _Word, _Word, _Long, _Address]),
}


def available() -> bool:
    """Return whether the kernels are there and not turned off."""
    return not reason()


def reason() -> str:
    """Return in one line why the kernels are not available; empty where they are."""
    return loaded()[1]


def level() -> str:
    """Return the level of instructions in use, such as "avx2"; empty without kernels."""
    return loaded()[2]


def use(wanted: str) -> str:
    """Use a level of instructions, or the best one for ""; returns its name, "" if there is none.

    For tests: what is chosen by itself is the best that the processor has.
    """
    lib, why, _ = loaded()
    found = None if why else lib.gradcomp_use(wanted.encode())
    return found.decode() if found else ""


def find(name: str) -> Path | None:
    """Return where a compiled library of this package is, None where there is none."""
    paths = (_HERE / f"{name}{end}" for end in EXTENSION_SUFFIXES)
    return next(filter(Path.exists, paths), None)


@functools.cache
def loaded() -> tuple[Any, str, str]:
    """Return the library, why there is none, and its level."""
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0":
        return None, f"{SWITCH}=0 turns it off", ""
    path = find("_kernels")
    if path is None:
        why = "it was installed without a C compiler, or for another Python"
        return None, f"no compiled library in {_HERE}: {why}", ""
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}", ""
    if lib.gradcomp_sizes() != 1000 * ctypes.sizeof(EncodeCall) + ctypes.sizeof(DecodeCall):
        return None, f"{path} is of another version: build it again", ""
    chosen = lib.gradcomp_use(b"" if wanted == "1" else wanted.encode())
    if not chosen:
        return None, f"{SWITCH}={wanted} is no level that this processor has", ""
    return lib, "", chosen.decode()


@functools.cache
def index(name: str) -> int:
    """Return the number of a kernel."""
    found: int = loaded()[0].gradcomp_find(name.encode())
    if found < 0:
        raise LookupError(f"no compiled kernel is called {name!r}")
    return found
