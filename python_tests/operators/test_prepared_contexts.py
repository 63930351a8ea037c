"""Prepared contexts: their scores equal those of unprepared contexts; also their memory and the errors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import Fragments, nn, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from itm_fast.ops.library import FallbackWarning
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.processes import run_python
from python_tests.helpers.tolerance import assert_close_to_exact

OPTIONS = (9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0)
# Ragged sets of words, some empty, and of regions; the longest set of each side exceeds a block of the kernels.
WORDS, REGIONS = [12, 0, 3, 40, 1, 17], [36, 5, 0, 1, 30, 36, 13]


def check(queries: Fragments, contexts: Fragments, **options: object) -> None:
    """Check that prepared scores equal the unprepared ones bit for bit and are as accurate as plain PyTorch."""
    with native_calls() as calls:
        scores = F_itm.cross_attention_scores(queries, F_itm.prepare(contexts), **options)
    assert [name for name, _ in calls] == ["cross_attention_grams", "cross_attention_scores_prepared"]
    assert torch.equal(scores, F_itm.cross_attention_scores(queries, contexts, **options))
    wide = torch.promote_types(queries.dtype, torch.float32)
    plain = reference.cross_attention_scores_packed(queries.to(wide), contexts.to(wide), **options)
    exact = reference.cross_attention_scores(queries.to(torch.float64), contexts.to(torch.float64), **options)
    # At the threshold of a focal mode, the kept contexts depend on the precision; bfloat16 products are summed in
    # another order. Equality with the unprepared scores, which have their own tests, covers both.
    if options.get("focal") is None and queries.dtype not in (torch.bfloat16, torch.float16):
        assert_close_to_exact(scores, plain, exact)


@pytest.mark.native
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_scores_are_those_of_the_contexts(normalization: str, focal: str | None, aggregation: str) -> None:
    words, regions = (random_fragments(n, 40, torch.float32, seed=i) for i, n in enumerate((WORDS, REGIONS)))
    options = {"normalization": normalization, "focal": focal, "aggregation": aggregation, "temperature": 4.0}
    check(words, regions, **options)
    check(regions, words, **options)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 8, 12, 16, 17, 33])
def test_every_dtype_and_width_of_a_query(dtype: torch.dtype, columns: int) -> None:
    """Queries fill half a panel of the kernels, a whole panel, and more."""
    check(random_fragments([columns], 136, dtype), random_fragments(REGIONS, 136, dtype, seed=1))


@pytest.mark.native
@pytest.mark.parametrize(("words", "regions"), [([], [3]), ([4], []), ([0, 0], [0]), ([], [])])
def test_nothing_to_score(words: list[int], regions: list[int]) -> None:
    sides = random_fragments(words, 5, torch.float32), random_fragments(regions, 5, torch.float32)
    check(*sides)
    assert not F_itm.cross_attention_scores(sides[0], F_itm.prepare(sides[1])).any()


@pytest.mark.native
def test_cancelling_contexts_are_formed_after_all() -> None:
    row = random_fragments([1], 24, torch.float32, seed=1).values
    rest = 1e-4 * random_fragments([1], 24, torch.float32, seed=2).values
    check(random_fragments([3], 24, torch.float32), Fragments(torch.cat([row, rest - row]), torch.tensor([0, 2])))


def test_the_module_takes_them() -> None:
    words, regions = random_fragments([3, 2], 8, torch.float32), random_fragments([4, 6, 1], 8, torch.float32, seed=1)
    module = nn.CrossAttentionScores(temperature=4.0, focal="prob")
    prepared = F_itm.prepare(regions)
    assert torch.equal(module(words, prepared), module(words, regions))
    assert prepared.fragments is regions
    assert (len(prepared), prepared.dtype, prepared.device) == (3, torch.float32, torch.device("cpu"))


@pytest.mark.native
def test_memory_is_as_documented() -> None:
    prepared = F_itm.prepare(random_fragments([36] * 5, 64, torch.float32))
    assert prepared.nbytes == 5 * 5184
    assert repr(prepared).endswith("nbytes=25920)")
    double = F_itm.prepare(random_fragments([36, 0], 64))
    assert double.nbytes == 2 * 5184
    assert F_itm.prepare(random_fragments([36], 64, torch.bfloat16)).nbytes == 5184


def test_a_gradient_is_refused() -> None:
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4], 8, torch.float32, seed=1)
    said = "contexts: prepared contexts support no gradient; pass the Fragments, or call under torch.no_grad()"
    learnt = regions.with_values(regions.values.clone().requires_grad_())
    for queries, contexts in ((words.with_values(words.values.clone().requires_grad_()), regions), (words, learnt)):
        prepared = F_itm.prepare(contexts)
        with pytest.raises(RuntimeError) as error:
            F_itm.cross_attention_scores(queries, prepared)
        assert str(error.value) == said
        with torch.no_grad():
            scores = F_itm.cross_attention_scores(queries, prepared)
        assert torch.equal(scores, F_itm.cross_attention_scores(words, regions))


def test_contexts_that_were_modified_are_refused() -> None:
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4], 8, torch.float32, seed=1)
    prepared = F_itm.prepare(regions)
    regions.values.mul_(2)
    with pytest.raises(RuntimeError, match=r"^contexts: the values were modified in place after prepare; call"):
        F_itm.cross_attention_scores(words, prepared)
    regions = random_fragments([4, 2], 8, torch.float32, seed=1)
    prepared = F_itm.prepare(regions)
    regions.offsets[1] = 2  # As much memory for the Gram matrices as before.
    with pytest.raises(RuntimeError, match=r"^contexts: the offsets were modified in place after prepare; call"):
        F_itm.cross_attention_scores(words, prepared)
    with torch.inference_mode():
        kept = F_itm.prepare(regions.with_values(regions.values.clone()))
        assert F_itm.cross_attention_scores(words, kept).shape == (1, 2)


def test_other_arguments_are_refused() -> None:
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4], 8, torch.float32, seed=1)
    with pytest.raises(TypeError, match=r"^contexts: expected Fragments, got a float32 tensor of shape"):
        F_itm.prepare(regions.values)
    with pytest.raises(TypeError, match=r"^contexts\.values: expected a tensor of dtype"):
        F_itm.prepare(regions.to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"^queries: expected Fragments, got PreparedContexts"):
        F_itm.cross_attention_scores(F_itm.prepare(words), F_itm.prepare(regions))
    with pytest.raises(TypeError, match=r"^contexts: expected the dtype of the queries, torch\.float64, got"):
        F_itm.cross_attention_scores(words.to(torch.float64), F_itm.prepare(regions))


def test_autocast_before_and_after() -> None:
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4, 9], 8, torch.float32, seed=1)
    before = F_itm.prepare(regions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F_itm.cross_attention_scores(words, regions)
        within = F_itm.prepare(regions)
        assert within.dtype == torch.bfloat16
        for prepared in (before, within):
            assert torch.equal(F_itm.cross_attention_scores(words, prepared), expected)


@pytest.mark.native
def test_opcheck_and_the_kernel_refuse() -> None:
    words, regions = random_fragments([3, 0], 5, torch.float32), random_fragments([4, 1], 5, torch.float32, seed=1)
    grams = torch.ops.itm_fast.cross_attention_grams(regions.values, regions.offsets)
    operands = (words.values, words.offsets, regions.values, regions.offsets)
    scores = torch.ops.itm_fast.cross_attention_scores_prepared
    torch.library.opcheck(torch.ops.itm_fast.cross_attention_grams.default, operands[2:])
    torch.library.opcheck(scores.default, (*operands, grams, *OPTIONS, "float32"))
    for wrong, said in (
        (grams[:-1], f"grams: expected {len(grams)} values for these contexts, got {len(grams) - 1}"),
        (grams[None], "grams: expected shape (n,), got 2 dimensions"),
        (grams.double(), "grams: expected float32 values for these contexts"),
        (grams.to("meta"), "grams: expected it on cpu like contexts, got another device"),
    ):
        with pytest.raises(RuntimeError) as error:
            scores.default._op_dk(torch._C.DispatchKey.CPU, *operands, wrong, *OPTIONS, "float32")
        assert str(error.value).splitlines()[0].endswith(said)


@pytest.mark.native
def test_compiles_whole() -> None:
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4, 9], 8, torch.float32, seed=1)
    prepared = F_itm.prepare(regions)
    compiled = torch.compile(
        lambda queries: F_itm.cross_attention_scores(queries, prepared), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(words), F_itm.cross_attention_scores(words, regions))


def test_the_reference_serves_them_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("itm_fast.ops.library._native", {})
    words, regions = random_fragments([3], 8, torch.float32), random_fragments([4, 9], 8, torch.float32, seed=1)
    prepared = F_itm.prepare(regions)
    assert prepared.nbytes == 0
    monkeypatch.setattr("itm_fast.ops.library._warned", set())
    with pytest.warns(FallbackWarning, match="packed reference"):
        scores = F_itm.cross_attention_scores(words, prepared)
    assert torch.equal(scores, reference.cross_attention_scores_packed(words, regions))


def test_copies_and_compiled_results_are_used_like_the_original() -> None:
    queries, contexts = (random_fragments([2, 3], 6, torch.float32, seed=seed) for seed in (0, 1))
    prepared = F_itm.prepare(contexts)
    compiled = torch.compile(F_itm.prepare, backend="eager")(contexts)
    expected = F_itm.cross_attention_scores(queries, prepared)
    copies = [copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))]
    for one in (*copies, compiled):
        assert torch.equal(F_itm.cross_attention_scores(queries, one), expected)
    for one in (prepared, *copies):
        one.fragments.values.mul_(2)
        with pytest.raises(RuntimeError, match="contexts: the values were modified in place after prepare"):
            copy.deepcopy(one)
        with pytest.raises(RuntimeError, match="contexts: the values were modified in place after prepare"):
            F_itm.cross_attention_scores(queries, one)


def test_copies_of_another_instruction_set_are_used_like_the_original(tmp_path: Path) -> None:
    """The rows of a Gram matrix are padded to a multiple that depends on the instruction set."""
    queries, contexts = (random_fragments([2, 5], 6, torch.float32, seed=seed) for seed in (0, 1))
    contexts.save(tmp_path / "contexts")
    code = f"""
import pickle
from itm_fast import Fragments
from itm_fast.functional import prepare
with open({str(tmp_path / "prepared")!r}, "wb") as file:
    pickle.dump(prepare(Fragments.load({str(tmp_path / "contexts")!r})), file)
"""
    run_python(code, ITM_FAST_CPU_ISA="portable")
    prepared = pickle.loads((tmp_path / "prepared").read_bytes())
    assert prepared.nbytes == F_itm.prepare(contexts).nbytes
    expected = F_itm.cross_attention_scores(queries, contexts)
    assert torch.equal(F_itm.cross_attention_scores(queries, prepared), expected)
