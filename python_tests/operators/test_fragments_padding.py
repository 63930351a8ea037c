"""`Fragments.from_padded` with masks and inside compiled modules, and files of `Fragments`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils import _pytree

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.nn.packing import padded_rows


def padded_with(lengths: list[int], max_len: int = 6, dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(lengths), max_len, dim, generator=generator), torch.tensor(lengths)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_a_mask_may_have_padding_anywhere(dtype: torch.dtype) -> None:
    padded, _ = padded_with([6, 6, 6])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0], [0] * 6]).to(dtype)
    packed = Fragments.from_padded(padded, mask=mask)
    assert packed.lengths.tolist() == [4, 2, 0]
    assert torch.equal(packed.values, torch.cat([padded[0, 2:], padded[1, [0, 2]]]))


def test_a_mask_on_the_right_is_that_of_the_lengths() -> None:
    padded, lengths = padded_with([2, 6, 0])
    mask = torch.arange(6) < lengths[:, None]
    by_mask, by_lengths = Fragments.from_padded(padded, mask=mask), Fragments.from_padded(padded, lengths)
    assert torch.equal(by_mask.values, by_lengths.values)
    assert torch.equal(by_mask.offsets, by_lengths.offsets)


def test_bad_masks() -> None:
    padded, lengths = padded_with([2, 6])
    with pytest.raises(ValueError, match=r"^mask: expected lengths or mask, got both$"):
        Fragments.from_padded(padded, lengths, mask=torch.ones(2, 6))
    with pytest.raises(TypeError, match=r"^mask: expected a bool or integer tensor, got a torch.float32 tensor"):
        Fragments.from_padded(padded, mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"^mask: expected shape \(2, 6\), got \(6, 2\)$"):
        Fragments.from_padded(padded, mask=torch.ones(6, 2, dtype=torch.bool))


class Head(nn.Module):
    """Score padded sets; padding must not change the scores, in any of its forms."""

    def __init__(self, with_mask: bool) -> None:
        super().__init__()
        self.fc, self.with_mask = nn.Linear(8, 8), with_mask

    def forward(self, words: Tensor, lengths: Tensor, regions: Tensor) -> Tensor:
        words = nn.functional.normalize(self.fc(words), dim=-1)
        if self.with_mask:
            packed = Fragments.from_padded(words, mask=torch.arange(words.shape[1]) < lengths[:, None])
        else:
            packed = Fragments.from_padded(words, lengths)
        return F_itm.cross_attention_scores(packed, Fragments.from_padded(regions))


@pytest.mark.parametrize("with_mask", [False, True])
def test_packing_traces_in_a_compiled_module(with_mask: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    head = Head(with_mask)
    compiled = torch.compile(head, fullgraph=True, backend=counter)
    for seed, lengths in enumerate(([2, 6, 1], [6, 6, 6, 3], [1, 2, 3, 4, 5], [5, 1], [6, 2, 0])):
        words, counts = padded_with(lengths, seed=seed)
        regions = torch.randn(4, 5, 8)
        expected = head(words, counts, regions)
        (wanted,) = torch.autograd.grad(expected.square().sum(), head.fc.weight)
        scores = compiled(words, counts, regions)
        (found,) = torch.autograd.grad(scores.square().sum(), head.fc.weight)
        torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(found, wanted)
        if seed == 2:
            compilations = counter.frame_count
    assert counter.frame_count == compilations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_files_keep_values_offsets_and_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    padded, lengths = padded_with([2, 0, 5])
    packed = Fragments.from_padded(padded.to(dtype), lengths)
    packed.save(tmp_path / "sets.safetensors")
    loaded = Fragments.load(tmp_path / "sets.safetensors")
    assert (loaded.dtype, loaded.offsets.dtype) == (dtype, packed.offsets.dtype)
    assert torch.equal(loaded.values, packed.values)
    assert torch.equal(loaded.offsets, packed.offsets)


def test_bad_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "sets.safetensors"
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=rf"^{file}: not a safetensors file: "):
        Fragments.load(file)
    safetensors.torch.save_file({"values": torch.zeros(3, 2)}, file)
    with pytest.raises(ValueError, match=rf"^{file}: expected the tensors offsets and values, got \['values'\]$"):
        Fragments.load(file)
    safetensors.torch.save_file({"values": torch.zeros(3, 2), "offsets": torch.tensor([0, 4])}, file)
    with pytest.raises(ValueError, match=rf"^{file}: offsets: expected the last to be the number of rows 3, got 4$"):
        Fragments.load(file)


@pytest.fixture
def packed_twice() -> Iterator[tuple[list[Fragments], list[Fragments]]]:
    """Pack two batches in eager mode, and in a compiled function, which leaves rows behind the last set."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *one: Fragments.from_padded(*one), backend="eager", fullgraph=True)
    batches = [(torch.randn(2, 5, 8), torch.tensor([2, 3])), (torch.randn(3, 5, 8), torch.tensor([1, 0, 4]))]
    yield [Fragments.from_padded(*one) for one in batches], [compiled(*one) for one in batches]
    torch._dynamo.reset()


def test_rows_behind_the_last_set_belong_to_no_set(
    packed_twice: tuple[list[Fragments], list[Fragments]], tmp_path: Path
) -> None:
    plain, with_rest = packed_twice
    assert [len(one.values) for one in with_rest] == [10, 15]
    with_rest = [one.to(torch.float64).with_values(one.values) for one in with_rest]
    moved = [_pytree.tree_map(lambda tensor: tensor.clone(), one) for one in with_rest]
    for parts in (with_rest, moved, [plain[0], with_rest[1]]):
        joined, expected = Fragments.cat(parts), Fragments.cat(plain)
        assert torch.equal(joined.values, expected.values)
        assert torch.equal(joined.offsets, expected.offsets)
    assert [one.may_have_rest for one in (*plain, *with_rest, *moved)] == [False] * 2 + [True] * 4
    for one, other in zip([*with_rest, *moved], [*plain, *plain], strict=True):
        one.check_offsets()
        assert torch.equal(one.trimmed().values, other.values)
        assert all(torch.equal(left, right) for left, right in zip(one.to_padded(), other.to_padded(), strict=True))
        one.save(tmp_path / "sets.safetensors")
        assert torch.equal(Fragments.load(tmp_path / "sets.safetensors").values, other.values)
        with pytest.raises(ValueError, match=r"^values: rows follow the last set, .* remove them by trimmed\(\)$"):
            one.set_index()
    assert plain[0].trimmed() is plain[0]


def test_rows_behind_sets_that_fill_the_padding() -> None:
    """The number of rows is then that of full sets."""
    torch._dynamo.reset()
    padded, lengths = padded_with([1, 3], max_len=3)
    plain = Fragments.from_padded(padded, lengths)
    packed = torch.compile(lambda *one: Fragments.from_padded(*one), backend="eager", fullgraph=True)(padded, lengths)
    assert packed.max_length * len(packed) == len(packed.values)
    contexts = Fragments.from_padded(torch.randn(2, 4, 8))
    assert torch.equal(padded_rows(packed, packed.values), padded_rows(plain, plain.values))
    for form in (reference.cross_attention_scores, reference.cross_attention_scores_packed):
        assert torch.equal(form(packed, contexts), form(plain, contexts))
    torch._dynamo.reset()


def test_sets_are_joined_in_a_compiled_function() -> None:
    torch._dynamo.reset()
    one, two = torch.randn(2, 5, 8), torch.randn(3, 5, 8)
    lengths, others = torch.tensor([2, 3]), torch.tensor([1, 0, 4])
    contexts = Fragments.from_padded(torch.randn(3, 4, 8))

    def scores() -> Tensor:
        both = Fragments.cat([Fragments.from_padded(one, lengths), Fragments.from_padded(two, others)])
        return F_itm.cross_attention_scores(both, contexts)

    assert torch.equal(torch.compile(scores, backend="eager", fullgraph=True)(), scores())
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_lengths_of_a_narrow_type_are_compared_as_numbers(dtype: torch.dtype) -> None:
    fragments = Fragments.from_padded(torch.zeros(2, 300, 1), torch.tensor([100, 127], dtype=dtype))
    assert fragments.offsets.tolist() == [0, 100, 227]
