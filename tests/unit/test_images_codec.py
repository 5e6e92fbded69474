"""What an image is to a network, against exact fractions."""

from fractions import Fraction

import pytest
import torch

from bigsgan.images.codec import byte_range, decode, encode

BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_byte_is_its_value_to_half_a_unit_of_float32():
    for byte, value in enumerate(decode(BYTES).tolist()):
        exact = Fraction(2 * byte, 255) - 1
        assert abs(Fraction(value) - exact) <= Fraction(1, 2**23), byte
    assert decode(BYTES)[[0, 255]].tolist() == [-1.0, 1.0]


def test_bytes_stay_as_they_are():
    values = BYTES.float()
    decode(values)
    assert torch.equal(values, BYTES.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_come_back(dtype):
    images = decode(BYTES).to(dtype)
    exact = ((images.double() + 1) * 127.5).round()
    assert torch.equal(encode(images).double(), exact)
    assert dtype == torch.bfloat16 or torch.equal(encode(images), BYTES)


def test_what_no_byte_can_hold():
    assert encode(torch.tensor([float("nan"), -9.0, 9.0, float("inf"), -float("inf")])).tolist() == [0, 0, 255, 255, 0]


def test_the_range_of_bytes_is_neither_rounded_nor_clipped():
    assert byte_range(torch.tensor([-1.0, 0.0, 0.001, 3.0])).tolist() == pytest.approx([0, 127.5, 127.6275, 510])
