"""The structures of ``kernels.h``, field for field."""

from __future__ import annotations

import ctypes


class EncodeJob(ctypes.Structure):
    """Rows to encode."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("start", ctypes.c_uint32),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("bits", ctypes.c_int32),
        ("headers", ctypes.c_int32),
        ("want_error", ctypes.c_int32),
    )


class DecodeJob(ctypes.Structure):
    """Rows to decode from several payloads."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("payloads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("scaled", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("headers", ctypes.c_int32),
    )
