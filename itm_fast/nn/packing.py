"""Sets of different lengths in the layouts of torch: packed for recurrent networks, or padded.

Inside: `Packing`, with which padding costs no work; `padded_rows`, `rows_of_padded`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from itm_fast.fragments import Fragments, check_has_values

__all__ = ["Packing", "padded_rows", "rows_of_padded"]


class Packing:
    """The positions of the rows of n sets in a padded tensor, in a time-major packing, and end to end.

    Empty sets are allowed and have no rows; `pack_padded_sequence` refuses them.

    Args:
        lengths: (n,) integers, the number of rows of each set.
        device: device of the rows.

    Raises:
        ValueError: `lengths` is a fake or meta tensor, which has no values.
        RuntimeError: under torch.export.
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        if torch.compiler.is_exporting():
            raise RuntimeError(
                "lengths: torch.export does not know their values, by which sets are packed; use "
                "itm_fast.adapters.onnx.export_onnx for caption encoders"
            )
        check_has_values("lengths", lengths)
        lengths = lengths.to("cpu", torch.int64)
        offsets = lengths.new_zeros(len(lengths) + 1)
        torch.cumsum(lengths, 0, out=offsets[1:])
        self.n_rows = int(offsets[-1])
        sorted_lengths, order = torch.sort(lengths, descending=True, stable=True)
        steps = torch.arange(int(sorted_lengths[0]) if len(lengths) else 0, device="cpu")[:, None]
        active = steps < sorted_lengths  # (max_length, n), time-major
        self.batch_sizes = active.sum(dim=1)  # PackedSequence wants it on the CPU
        sets = order.expand_as(active)[active]
        self._step = steps.expand_as(active)[active].to(device)
        self._set = sets.to(device)
        self.offsets = offsets.to(device)
        # Of each packed row its place end to end, and the other way round.
        self._row = self.offsets[self._set] + self._step
        packed_row = torch.empty(self.n_rows, dtype=torch.int64, device=device)
        packed_row[self._row] = torch.arange(self.n_rows, device=device)
        self.packed_row = packed_row

    def pack(self, values: Tensor) -> PackedSequence:
        """Pack rows (N, d), stored end to end, for a recurrent network."""
        return PackedSequence(values[self._row], self.batch_sizes)

    def unpack(self, packed: Tensor) -> Fragments:
        """Return packed rows as Fragments: end to end, in the order of the sets."""
        return Fragments(packed[self.packed_row], self.offsets, check=False, max_length=len(self.batch_sizes))

    def padded_index(self, width: int) -> Tensor:
        """Return the index of each packed row in a flattened padded tensor of `width` columns."""
        return self._set * width + self._step


def padded_rows(sets: Fragments, rows: Tensor) -> Tensor:
    """Pad rows (N, d) of `sets` with zeros to (n_sets, longest, d), without a copy if no set needs padding."""
    if _is_full(sets):
        return rows.reshape(len(sets), sets.max_length, rows.shape[1])
    return sets.with_values(rows).to_padded()[0]


def rows_of_padded(sets: Fragments, padded: Tensor) -> Tensor:
    """Return the rows (N, d) of `sets` from a padded tensor (n_sets, longest, d)."""
    if _is_full(sets):
        return padded.reshape(sets.values.shape[0], padded.shape[2])
    numbers = sets.set_index()
    return padded[numbers, torch.arange(sets.values.shape[0], device=numbers.device) - sets.offsets[numbers]]


def _is_full(sets: Fragments) -> bool:
    return not sets.may_have_rest and sets.values.shape[0] == len(sets) * sets.max_length
