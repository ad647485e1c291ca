"""The structures of ``kernels.h``, field for field."""

from __future__ import annotations

import ctypes


class EncodeCall(ctypes.Structure):
    """A whole tensor to encode."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("spans", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("kernel", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("bits", ctypes.c_int32),
        ("headers", ctypes.c_int32),
        ("want_error", ctypes.c_int32),
    )


class DecodeCall(ctypes.Structure):
    """A whole tensor to decode from several payloads."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("payloads", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("spans", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("kernel", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("scaled", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("headers", ctypes.c_int32),
    )
