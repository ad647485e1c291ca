"""Horovod's variables are read as Horovod reads them."""

from __future__ import annotations

import pytest

from horovod_gradcomp.core import environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, 7), ("12", 12), ("0", 0), ("", 0), ("abc", 0), ("true", 0), (" 3x", 3), ("-2", -2)],
)
def test_number(monkeypatch, text, expected):
    monkeypatch.delenv("HOROVOD_X", raising=False)
    if text is not None:
        monkeypatch.setenv("HOROVOD_X", text)
    assert environment.number("HOROVOD_X", 7) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(None, False), ("1", True), ("0", False), ("", False)]
)
def test_elastic(monkeypatch, text, expected):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    if text is not None:
        monkeypatch.setenv("HOROVOD_ELASTIC", text)
    assert environment.elastic() is expected
