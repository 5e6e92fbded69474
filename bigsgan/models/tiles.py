"""Sizes of kernels' grids. Triton's functions of these names take the host some microseconds a call."""

from __future__ import annotations


def cdiv(num: int, size: int) -> int:
    """Number of parts of ``size`` that hold ``num``, both positive."""
    return -(-num // size)


def next_power_of_2(num: int) -> int:
    """The least power of 2 that is at least ``num``, which is positive."""
    return 1 << (num - 1).bit_length()
