"""Random numbers that depend on what is drawn, never on which process draws it.

Every draw is a pure function of (seed, stream, counters, global sample index), so that a run gives the same latents,
labels, noise and data order on one process, on many ranks and after a resume. torch's own generators cannot do
this: the CPU generator gives different numbers for different tensor sizes. The counter-based generator is
Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") as numpy implements it: one jump to
a sample's counter, then one contiguous read for a whole slice of samples.

Shapes: N samples in the slice, W numbers a sample.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

_WORDS_PER_BLOCK = 4  # Philox4x64 yields four 64-bit words for each counter value


@dataclass(frozen=True)
class Draws:
    """The source of all randomness of a run, named by its seed (0 <= seed < 2**63)."""

    seed: int

    def words(self, stream: str, counters: tuple[int, ...], first: int, num: int, width: int) -> np.ndarray:
        """Return raw words of samples ``first .. first + num``: uint64 of shape (num, width).

        Args:
            stream: Name of the use, such as ``"latent"``: different names never share numbers.
            counters: The draw's place in the run, such as (update, discriminator step). A stream always has the same
                number of counters: (1,) and (1, 0) are one draw.
            first: Global index of the slice's first sample.
            num: Number of samples in the slice.
            width: Number of words for each sample.
        """
        blocks = -(-width // _WORDS_PER_BLOCK)
        bits = np.random.Philox(key=self._key(stream, counters))
        bits.advance(first * blocks)
        return bits.random_raw(num * blocks * _WORDS_PER_BLOCK).reshape(num, -1)[:, :width]

    def uniform(self, stream: str, counters: tuple[int, ...], first: int, num: int, width: int) -> np.ndarray:
        """Return uniform numbers in the open interval (0, 1), with 52 random bits: float64 (num, width)."""
        # With 53 bits the largest number plus a half would round up to 1.
        return ((self.words(stream, counters, first, num, width) >> np.uint64(12)) + 0.5) * 2.0**-52

    def normal(self, stream: str, counters: tuple[int, ...], first: int, num: int, width: int) -> np.ndarray:
        """Return standard normal numbers by the Box-Muller transform: float32 (num, width)."""
        half = -(-width // 2)
        u = self.uniform(stream, counters, first, num, 2 * half)
        radius, angle = np.sqrt(-2.0 * np.log(u[:, :half])), 2.0 * np.pi * u[:, half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :width].astype(np.float32)

    def truncated_normal(self, stream: str, first: int, num: int, width: int, threshold: float) -> np.ndarray:
        """Return normal numbers, resampled while their magnitude exceeds ``threshold`` (> 0): float32 (num, width).

        The truncation trick of Brock et al. 2019 (arXiv 1809.11096), section 3.1.
        """
        values = self.normal(stream, (0,), first, num, width)
        attempt = 0
        while (outside := np.abs(values) > threshold).any():
            attempt += 1
            values = np.where(outside, self.normal(stream, (attempt,), first, num, width), values)
        return values

    def integers(self, stream: str, counters: tuple[int, ...], first: int, num: int, high: int) -> np.ndarray:
        """Return one integer in [0, high) for each sample: int64 (num,). The bias is below high / 2**32."""
        top = self.words(stream, counters, first, num, 1)[:, 0] >> np.uint64(32)
        return ((top * np.uint64(high)) >> np.uint64(32)).astype(np.int64)

    def seeds(self, stream: str, counters: tuple[int, ...], first: int, num: int) -> np.ndarray:
        """Return a seed for each sample, from which a device draws more: int64 (num,), not negative."""
        return (self.words(stream, counters, first, num, 1)[:, 0] >> np.uint64(1)).astype(np.int64)

    def permutation(self, stream: str, counters: tuple[int, ...], num: int) -> np.ndarray:
        """Return a random order of 0 .. num - 1: int64 (num,)."""
        return np.random.Generator(np.random.Philox(key=self._key(stream, counters))).permutation(num)

    def _key(self, stream: str, counters: tuple[int, ...]) -> np.ndarray:
        # Not hash(): Python's own hash of a string differs between processes.
        entropy = [self.seed, zlib.crc32(stream.encode()), *counters]
        return np.random.SeedSequence(entropy).generate_state(2, np.uint64)
