"""Dropout with a counter-based generator: the mask depends only on the seed and the position of each element.

Tiling, threads, chunks and recomputation do not change the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CounterDropout", "philox4x32"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Generate random words with Philox4x32-10 in int64 arithmetic.

    Args:
        counter: four int64 tensors with values in [0, 2^32); their shapes broadcast.
        key: two int64 tensors with values in [0, 2^32).

    Returns:
        Four int64 tensors of the broadcast shape, each uniform in [0, 2^32).

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a 64-bit product, which would overflow int64."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


class CounterDropout:
    """Inverted dropout: drop an element with `probability`, otherwise divide it by `1 - probability`.

    Channel `i` at a given query row, context set and stream uses word `i % 4` of Philox4x32-10. The counter is
    `(row, context, stream, i // 4)` modulo 2^32; the key is the lower and the upper half of the seed. A word below
    `floor(probability * 2^32)` drops the element.

    Args:
        probability: dropout probability in [0, 1).
        seed: an int, or an int64 tensor with one element.
        device: device of the masks.
    """

    def __init__(self, probability: float, seed: int | Tensor, device: torch.device) -> None:
        self.probability = probability
        if isinstance(seed, Tensor):
            key = seed.to(device).reshape(())
        else:
            # Unlike torch.tensor, torch.full does not synchronize with the GPU.
            key = torch.full((), seed, dtype=torch.int64, device=device)
        self._key = (key & _WORD, (key >> 32) & _WORD)

    def factors(self, rows: Tensor, contexts: Tensor, stream: int, channels: int, dtype: torch.dtype) -> Tensor:
        """Return the factors to multiply elements with: 0 or `1 / (1 - probability)`.

        Args:
            rows: indices of the query rows in the whole call, not in one chunk of it.
            contexts: indices of the context sets in the whole call; broadcast with `rows`.
            stream: distinguishes masks at the same position: twice the step, plus 1 for the guidance of RAR.
            channels: number of channels.
            dtype: dtype of the result.

        Returns:
            `(..., channels)`, where `...` is the broadcast shape of `rows` and `contexts`.
        """
        blocks = torch.arange((channels + 3) // 4, device=rows.device)
        places = [numbers.long()[..., None] & _WORD for numbers in (rows, contexts)]
        counter = (*places, torch.full_like(blocks, stream), blocks)
        words = torch.stack(philox4x32(counter, self._key), dim=-1).flatten(-2)[..., :channels]
        kept = words >= int(self.probability * 2**32)
        return kept.to(dtype) / (1.0 - self.probability)
