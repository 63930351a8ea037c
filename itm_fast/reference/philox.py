"""Dropout by a counter-based generator: every element's mask follows from the seed and the element's place alone.

So the mask is the same whatever the tiling, the number of threads or chunks, and whenever it is made again. Inside:
`philox4x32`, `CounterDropout`.
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
    """Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) in int64 arithmetic.

    Args:
        counter: four int64 tensors of values below 2^32, which broadcast against each other.
        key: two such tensors.

    Returns:
        Four int64 tensors of the broadcast shape, each uniform in [0, 2^32).
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
    """The upper and the lower half of a product of 64 bits, which a signed integer of 64 bits could not hold."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


class CounterDropout:
    """Inverted dropout: an element is dropped with `probability`, and else divided by `1 - probability`.

    The mask of channel `i` at a query row, a context set and a stream is word `i % 4` of
    Philox4x32-10 with the counter `(row, context, stream, i // 4)`, all modulo 2^32, and the lower and upper half of
    the seed as the key; a word below `floor(probability * 2^32)` drops the element.

    Args:
        probability: in [0, 1).
        seed: an int, or an int64 tensor of one element.
        device: of the masks.
    """

    def __init__(self, probability: float, seed: int | Tensor, device: torch.device) -> None:
        self.probability = probability
        if isinstance(seed, Tensor):
            key = seed.to(device).reshape(())
        else:
            # Unlike torch.tensor, this does not wait for a GPU.
            key = torch.full((), seed, dtype=torch.int64, device=device)
        self._key = (key & _WORD, (key >> 32) & _WORD)

    def factors(self, rows: Tensor, contexts: Tensor, stream: int, channels: int, dtype: torch.dtype) -> Tensor:
        """What elements are multiplied with: `(..., channels)` for the broadcast shape of `rows` and `contexts`.

        Args:
            rows: numbers of query rows in the whole call, not in a chunk of it.
            contexts: numbers of context sets in the whole call.
            stream: tells apart what is dropped at one place: twice the step, plus 1 for the guidance of RAR.
            channels: number of channels.
            dtype: of the result.
        """
        blocks = torch.arange((channels + 3) // 4, device=rows.device)
        places = [numbers.long()[..., None] & _WORD for numbers in (rows, contexts)]
        counter = (*places, torch.full_like(blocks, stream), blocks)
        words = torch.stack(philox4x32(counter, self._key), dim=-1).flatten(-2)[..., :channels]
        kept = words >= int(self.probability * 2**32)
        return kept.to(dtype) / (1.0 - self.probability)
