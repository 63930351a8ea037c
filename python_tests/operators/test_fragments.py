"""`Fragments`: packing, unpacking, selection, checks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from itm_fast import Fragments
from itm_fast.nn import ImageEncoder
from python_tests.helpers.fragments import random_fragments

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(LENGTHS)
def test_padded_and_back(lengths: list[int]) -> None:
    fragments = random_fragments(lengths, 3)
    padded, counted = fragments.to_padded(fill=-7.0)
    assert padded.shape == (len(lengths), max(lengths), 3)
    assert counted.tolist() == lengths
    for i, n in enumerate(lengths):
        assert torch.equal(padded[i, :n], fragments[i])
        assert bool((padded[i, n:] == -7.0).all())
    again = Fragments.from_padded(padded, counted)
    assert torch.equal(again.values, fragments.values)
    assert again.offsets.tolist() == fragments.offsets.tolist()


@given(LENGTHS, st.data())
def test_index_select_takes_whole_sets(lengths: list[int], data: st.DataObject) -> None:
    fragments = random_fragments(lengths, 2)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    selected = fragments.index_select(torch.tensor(chosen, dtype=torch.int64))
    assert len(selected) == len(chosen)
    for position, index in enumerate(chosen):
        assert torch.equal(selected[position], fragments[index])


def test_full_padded_is_a_view() -> None:
    padded = torch.randn(4, 3, 2)
    fragments = Fragments.from_padded(padded)
    assert fragments.values.data_ptr() == padded.data_ptr()
    assert fragments.offsets.tolist() == [0, 3, 6, 9, 12]
    assert fragments.max_length == 3


def test_list_and_cat() -> None:
    parts = [torch.randn(2, 3), torch.randn(0, 3), torch.randn(4, 3)]
    fragments = Fragments.from_list(parts)
    assert fragments.lengths.tolist() == [2, 0, 4]
    both = Fragments.cat([fragments, fragments])
    assert both.offsets.tolist() == [0, 2, 2, 6, 8, 8, 12]
    assert not both.knows_max_length
    known = [Fragments(part.values, part.offsets, max_length=n) for part, n in ((fragments, 4), (both, 5))]
    joined = Fragments.cat(known)
    assert joined.knows_max_length
    assert joined.max_length == 5
    assert torch.equal(both[5], parts[2])
    assert torch.equal(both[-1], parts[2])
    with pytest.raises(IndexError, match="set 6 of 6"):
        both[6]


def test_gradient_flows_through_packing() -> None:
    padded = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([1, 3])
    out, _ = Fragments.from_padded(padded, lengths).to_padded()
    (out**2).sum().backward()
    expected = 2 * padded.detach()
    expected[0, 1:] = 0
    assert torch.equal(padded.grad, expected)


def test_set_index_dtype_and_movement() -> None:
    fragments = random_fragments([2, 0, 1], 4, torch.float32)
    assert fragments.set_index().tolist() == [0, 0, 2]
    half = fragments.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.offsets.dtype == torch.int64
    assert len(half.detach()) == 3
    assert repr(fragments) == "Fragments(sets=3, rows=3, d=4, dtype=torch.float32, device='cpu')"


def test_is_a_pytree() -> None:
    fragments = random_fragments([2, 1], 4)
    doubled = _pytree.tree_map(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, fragments)
    assert torch.equal(doubled.values, fragments.values * 2)
    assert len(_pytree.tree_leaves([fragments, fragments])) == 4


def test_data_parallel_finds_the_tensors(tmp_path: Path) -> None:
    """With `find_unused_parameters`, it takes weights for unused whose results it does not find in the output."""
    torch.manual_seed(0)
    plain, regions = ImageEncoder(5, 4), torch.randn(3, 6, 5)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)
        for model in (plain, parallel):
            model(regions).values[:, 0].sum().backward()
        for own, expected in zip(parallel.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], "offsets: expected the first to be 0, got 1"),
        ([0, 2, 1, 3], r"offsets: expected them never to fall, got 2 then 1 at 1"),
        ([0, 4], "offsets: expected the last to be the number of rows 3, got 4"),
        ([0, 2], "offsets: expected the last to be the number of rows 3, got 2"),
    ],
)
def test_bad_offset_values(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fragments(torch.zeros(3, 2), torch.tensor(offsets))


def test_bad_kinds_and_shapes() -> None:
    offsets = torch.tensor([0, 3])
    with pytest.raises(TypeError, match=r"values: expected a floating point tensor, got a torch\.int64 tensor"):
        Fragments(torch.zeros(3, 2, dtype=torch.int64), offsets)
    with pytest.raises(TypeError, match=r"offsets: expected an int32 or int64 tensor, got a torch\.float32"):
        Fragments(torch.zeros(3, 2), offsets.float())
    with pytest.raises(ValueError, match=r"values: expected shape \(N, d\), got \(3,\)"):
        Fragments(torch.zeros(3), offsets)
    with pytest.raises(ValueError, match=r"offsets: expected shape \(n_sets \+ 1,\), got \(0,\)"):
        Fragments(torch.zeros(3, 2), offsets[:0])
    with pytest.raises(ValueError, match="offsets: expected them on meta beside the values, got cpu"):
        Fragments(torch.zeros(3, 2, device="meta"), offsets)
    with pytest.raises(ValueError, match=r"lengths: expected values from 0 to 2, got 1 to 3"):
        Fragments.from_padded(torch.zeros(2, 2, 1), torch.tensor([1, 3]))
    with pytest.raises(TypeError, match=r"lengths: expected an integer tensor, got list"):
        Fragments.from_padded(torch.zeros(2, 2, 1), [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], r"tensors: expected at least one tensor"),
        ([1], r"tensors\[0\]: expected a tensor of shape \(n, d\), got int"),
        (
            [torch.zeros(())],
            r"tensors\[0\]: expected a tensor of shape \(n, d\), got a torch.float32 tensor of shape \(\)",
        ),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], r"tensors\[1\]: expected width 2, .* like the first, got .*\(1, 3\)"),
        ([torch.zeros(1, 2), torch.zeros(1, 2).double()], r"tensors\[1\]: expected width 2, torch.float32 and cpu"),
    ],
)
def test_bad_lists(tensors: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fragments.from_list(tensors)


def test_bad_selections_and_joins() -> None:
    fragments = random_fragments([2, 1], 3)
    for indices in ([5], [-1]):
        with pytest.raises(ValueError, match=r"indices: expected values from 0 to 1, got"):
            fragments.index_select(torch.tensor(indices))
    with pytest.raises(TypeError, match=r"index: expected an int .*, got slice"):
        fragments[0:1]  # type: ignore[index]
    with pytest.raises(ValueError, match="fragments: expected at least one Fragments"):
        Fragments.cat(part for part in ())
    with pytest.raises(ValueError, match=r"fragments\[1\]: expected width 3"):
        Fragments.cat([fragments, random_fragments([1], 4)])
    with pytest.raises(TypeError, match=r"fragments\[0\]: expected Fragments, got int"):
        Fragments.cat([3])  # type: ignore[list-item]
    assert len(Fragments.cat(part for part in (fragments, fragments))) == 4
