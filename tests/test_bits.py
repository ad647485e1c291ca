"""Packing: every width, both frameworks, and the bytes themselves."""

import numpy as np
import pytest

from horovod_gradcomp.core import bits as packing

WIDTHS = pytest.mark.parametrize("bits", range(1, 9))

GOLDEN = {
    1: "ff00",
    2: "ff0055aa",
    3: "ff0055aa66cc",
    4: "3b80d52a7fc4196e",
    5: "3b80d52a7fc4196eb693",
    6: "3b80d52a7fc4196e349379e3",
    7: "3b80d52a7fc4196e349379e36a56",
    8: "0b30557a9fc4e90e33587da2c7ec1136",
}
"""Of sixteen codes (37 i + 11) mod 2^b, from the rule; the wire never changes without a version."""


def codes_of(rows, width, bits, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**bits, (rows, width)).astype(np.uint8)


@WIDTHS
def test_round_trip(fw, bits):
    for rows, width in ((1, 8), (3, 8), (2, 24), (5, 1024), (1, 65_536)):
        codes = codes_of(rows, width, bits)
        packed = packing.pack(fw.xp, fw.tensor(codes), bits)
        assert tuple(packed.shape) == (rows, width * bits // 8)
        assert packed.shape[1] == packing.packed_width(width, bits)
        assert fw.array(packed).dtype == np.uint8
        back = packing.unpack(fw.xp, packed, bits)
        assert fw.array(back).dtype == np.uint8
        np.testing.assert_array_equal(fw.array(back), codes)


@WIDTHS
def test_all_zeros_and_all_ones(fw, bits):
    for code in (0, 2**bits - 1):
        codes = np.full((2, 16), code, np.uint8)
        packed = packing.pack(fw.xp, fw.tensor(codes), bits)
        assert set(fw.array(packed).reshape(-1)) == {0 if code == 0 else 255}
        np.testing.assert_array_equal(fw.array(packing.unpack(fw.xp, packed, bits)), codes)


@WIDTHS
def test_every_code_survives_in_every_place(fw, bits):
    for place in range(8):
        codes = np.zeros((2**bits, 8), np.uint8)
        codes[:, place] = np.arange(2**bits)
        packed = packing.pack(fw.xp, fw.tensor(codes), bits)
        np.testing.assert_array_equal(fw.array(packing.unpack(fw.xp, packed, bits)), codes)


@WIDTHS
def test_golden_bytes(fw, bits):
    codes = ((37 * np.arange(16) + 11) % 2**bits).astype(np.uint8).reshape(1, 16)
    assert fw.array(packing.pack(fw.xp, fw.tensor(codes), bits)).tobytes().hex() == GOLDEN[bits]


@WIDTHS
def test_packing_leaves_the_codes_alone(fw, bits):
    codes = codes_of(3, 32, bits)
    tensor = fw.tensor(codes)
    packed = packing.pack(fw.xp, tensor, bits)
    np.testing.assert_array_equal(fw.array(tensor), codes)
    before = fw.array(packed)
    packing.unpack(fw.xp, packed, bits)
    np.testing.assert_array_equal(fw.array(packed), before)


@WIDTHS
def test_parts_make_up_the_width(bits):
    parts = packing.parts(bits)
    assert sum(parts) == bits
    assert all(8 % part == 0 for part in parts)


@WIDTHS
def test_widths_round_up(bits):
    for width in range(100):
        assert packing.padded_width(width) == -(-width // 8) * 8
        assert packing.packed_width(width, bits) == -(-width // 8) * bits
