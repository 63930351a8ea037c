"""A one-layer GRU from its equations, step by step.

Inside: `directions`, `gru_states`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def directions(rnn: torch.nn.GRU, words: Tensor) -> list[Tensor]:
    """Compute the states (L, d) of each direction over one sequence of words (L, word_dim)."""
    result = []
    orders = [("", range(len(words))), ("_reverse", reversed(range(len(words))))]
    for suffix, order in orders[: 2 if rnn.bidirectional else 1]:
        w_i, w_h, b_i, b_h = (
            getattr(rnn, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        state = torch.zeros(rnn.hidden_size, dtype=words.dtype)
        states: dict[int, Tensor] = {}
        for step in order:
            of_input, of_state = (w_i @ words[step] + b_i).chunk(3), (w_h @ state + b_h).chunk(3)
            reset, update = torch.sigmoid(of_input[0] + of_state[0]), torch.sigmoid(of_input[1] + of_state[1])
            new = torch.tanh(of_input[2] + reset * of_state[2])
            state = (1 - update) * new + update * state
            states[step] = state
        result.append(torch.stack([states[step] for step in range(len(words))]))
    return result


def gru_states(rnn: torch.nn.GRU, words: Tensor) -> Tensor:
    """Compute the mean of the directions (L, d)."""
    return torch.stack(directions(rnn, words)).mean(0)
