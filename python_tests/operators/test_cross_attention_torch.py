"""`cross_attention_scores` in PyTorch: opcheck, compile, autocast, precision, errors, fallback."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.benchmarking import workloads
from itm_fast.benchmarking.measure import peak_memory
from itm_fast.ops import library, precision
from itm_fast.ops.cross_attention import longest_set, rounded_length
from itm_fast.ops.library import use_native
from itm_fast.ops.precision import autocast, compute_precision, without_autocast
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.stand_in import stand_in

OPTIONS = (9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0, "float32")


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _matmul_precision():
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.native
def test_opcheck() -> None:
    queries, contexts = random_fragments([3, 0, 2], 5), random_fragments([4, 1], 5, seed=1)
    tensors = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    torch.library.opcheck(torch.ops.itm_fast.cross_attention_scores.default, (*tensors, *OPTIONS))
    gradient = torch.randn(3, 2, dtype=torch.float64)
    backward = torch.ops.itm_fast.cross_attention_scores_backward.default
    torch.library.opcheck(backward, (gradient, *tensors, *OPTIONS, True, True))
    # With the lengths of the longest sets, which have no effect on a CPU.
    torch.library.opcheck(torch.ops.itm_fast.cross_attention_scores.default, (*tensors, *OPTIONS, 1, 4))
    torch.library.opcheck(backward, (gradient, *tensors, *OPTIONS, True, False, 1, 4))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_whole_and_does_not_recompile() -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def loss(words: Fragments, regions: Fragments) -> torch.Tensor:
        return F_itm.triplet_loss(F_itm.cross_attention_scores(words, regions).t(), margin=0.3)

    after_third = 0
    for batch, lengths in enumerate(([3, 5], [4, 2, 6], [1, 7, 2, 2], [9, 3, 1, 4, 5], [2, 2, 8, 3, 1, 1])):
        words = random_fragments(lengths, 8, torch.float32, seed=batch)
        regions = random_fragments([4 + batch] * len(lengths), 8, torch.float32, seed=10 + batch)
        w, r = words.values.requires_grad_(), regions.values.requires_grad_()
        value = loss(words.with_values(w), regions.with_values(r))
        value.backward()
        exact_w, exact_r = (part.detach().double().requires_grad_() for part in (w, r))
        scores = reference.cross_attention_scores(words.with_values(exact_w), regions.with_values(exact_r))
        exact = reference.triplet_loss(scores.t(), margin=0.3)
        exact.backward()
        assert value.item() == pytest.approx(exact.item(), abs=1e-5)
        assert torch.allclose(w.grad.double(), exact_w.grad, atol=1e-5)
        assert torch.allclose(r.grad.double(), exact_r.grad, atol=1e-5)
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_lengths_that_differ_do_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known lengths reach the kernels on CUDA, rounded up under `torch.compile`."""
    monkeypatch.setattr(Fragments, "device", torch.device("cuda"))
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    compiled = torch.compile(F_itm.cross_attention_scores, fullgraph=True, backend=count)
    graphs = []
    for batch, longest in enumerate((3, 5, 8, 60, 9, 64, 200, 180)):
        words, regions = random_fragments([2] * (batch + 2), 8), random_fragments([longest, 1], 8, seed=batch)
        assert torch.equal(compiled(words, regions), F_itm.cross_attention_scores(words, regions))
        known = [Fragments(sets.values, sets.offsets, max_length=sets.max_length) for sets in (words, regions)]
        assert torch.equal(compiled(*known), F_itm.cross_attention_scores(*known))
        graphs.append(len(compilations))
    # Up to 64 rows there is one graph, and up to 256 another.
    assert graphs[2:6] == [graphs[2]] * 4
    assert graphs[6:] == [graphs[2] + 1] * 2


def test_lengths_are_known_or_not_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = random_fragments([4, 200], 8, torch.float32)
    known = Fragments(sets.values, sets.offsets, max_length=200)
    assert longest_set(known) == 0  # on a CPU
    with stand_in():
        assert [longest_set(Fragments(sets.values, sets.offsets)), longest_set(known)] == [0, 200]
        with native_calls() as calls:
            scores = F_itm.cross_attention_scores(known.with_values(sets.values.clone().requires_grad_()), known)
            scores.sum().backward()
        assert [arguments[-2:] for _, (arguments, _) in calls] == [(200, 200)] * 2
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert longest_set(known) == 256
    # The rows of tiles are among them, so that rounded lengths fit the same tiles.
    lengths = (0, 13, 65, 81, 112, 113, 129, 640, 10_000)
    assert list(map(rounded_length, lengths)) == [64, 64, 80, 112, 112, 128, 256, 640, 640]


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_through_inductor() -> None:
    words, regions = random_fragments([3, 5], 8, torch.float32), random_fragments([4, 4], 8, torch.float32, seed=1)

    def twice(w: Fragments, r: Fragments) -> torch.Tensor:
        return 2 * F_itm.cross_attention_scores(w, r, focal="prob") + 1

    assert torch.allclose(torch.compile(twice, fullgraph=True)(words, regions), twice(words, regions))


def test_autocast_casts_both_sides_and_gradients_come_back_in_the_input_dtype() -> None:
    queries, contexts = random_fragments([3, 2], 16, torch.float32), random_fragments([4], 16, torch.bfloat16, seed=1)
    q, c = queries.values.requires_grad_(), contexts.values.requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype), native_calls() as calls:
            scores = F_itm.cross_attention_scores(queries.with_values(q), contexts.with_values(c))
        arguments = calls[0][1][0]
        assert arguments[0].dtype == arguments[2].dtype == dtype
        assert arguments[-1] == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        assert scores.dtype == torch.float32
        expected = F_itm.cross_attention_scores(queries.detach().to(dtype), contexts.detach().to(dtype))
        assert torch.equal(scores, expected)
    scores.sum().backward()
    assert q.grad.dtype == torch.float32
    assert c.grad.dtype == torch.bfloat16
    double = random_fragments([2], 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F_itm.cross_attention_scores(double, double).dtype == torch.float64
        with pytest.raises(TypeError, match=r"dtype of the queries, torch\.float64, got torch\.bfloat16"):
            F_itm.cross_attention_scores(double, contexts.detach())


@pytest.mark.usefixtures("_matmul_precision")
def test_precision_follows_the_setting_in_both_forms() -> None:
    single = torch.zeros(1)
    assert compute_precision(single) == "float32"
    torch.set_float32_matmul_precision("high")
    assert compute_precision(single) in ("bf16x3", "bf16")  # PyTorch maps "high" to one of them on the CPU.
    torch.set_float32_matmul_precision("medium")
    assert compute_precision(single) == "bf16"
    torch.set_float32_matmul_precision("highest")
    assert compute_precision(single) == "float32"
    for setting, expected in (("ieee", "float32"), ("tf32", "bf16x3"), ("bf16", "bf16")):
        torch.backends.mkldnn.matmul.fp32_precision = setting
        assert compute_precision(single) == expected
    assert compute_precision(torch.zeros(1, dtype=torch.float64)) == "float64"
    assert compute_precision(torch.zeros(1, dtype=torch.float16)) == "fp16"


@pytest.mark.usefixtures("_matmul_precision")
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_a_gpu_knows_medium_from_high(setting: str) -> None:
    """PyTorch sets TF32 for both on CUDA."""
    torch.set_float32_matmul_precision(setting)
    precisions = {"highest": ("ieee", "none", "highest"), "high": ("tf32", "high"), "medium": ("medium",)}
    assert precision._float32_setting("cuda") in precisions[setting]


@pytest.mark.usefixtures("_matmul_precision")
def test_backward_keeps_the_precision_of_the_forward() -> None:
    queries, contexts = random_fragments([3], 8, torch.float32), random_fragments([4], 8, torch.float32, seed=1)
    q = queries.values.requires_grad_()
    scores = F_itm.cross_attention_scores(queries.with_values(q), contexts)
    torch.set_float32_matmul_precision("medium")
    with native_calls() as calls:
        scores.sum().backward()
        F_itm.cross_attention_scores(queries.detach(), contexts)
    assert [arguments[-3] for name, (arguments, _) in calls if name.endswith("backward")] == ["float32"]
    assert [arguments[-1] for name, (arguments, _) in calls if not name.endswith("backward")] == ["bf16"]


@pytest.mark.usefixtures("_matmul_precision", "_fresh_compiler")
def test_compiled_code_follows_the_precision_setting() -> None:
    queries, contexts = random_fragments([3], 8, torch.float32), random_fragments([4], 8, torch.float32, seed=1)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(F_itm.cross_attention_scores, fullgraph=True, backend=keep)
    before = compiled(queries, contexts)
    # The precision is a guard of torch.compile, so a change recompiles.
    torch.set_float32_matmul_precision("medium")
    after = compiled(queries, contexts)
    assert torch.allclose(after, before, atol=1e-2)
    assert _precisions(graphs) == ["float32", "bf16"]


def _precisions(graphs: list[torch.fx.GraphModule]) -> list[str]:
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return [node.args[10] for node in nodes]


def test_what_is_not_differentiable_says_so() -> None:
    queries, contexts = random_fragments([3], 4), random_fragments([2], 4, seed=1)
    q = queries.values.requires_grad_()
    scores = F_itm.cross_attention_scores(queries.with_values(q), contexts)
    (gradient,) = torch.autograd.grad(scores.sum(), q, create_graph=True)
    advice = "use itm_fast.reference, which is plain PyTorch"
    with pytest.raises(RuntimeError, match=f"cross_attention_scores does not support second derivatives: {advice}"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=r"cross_attention_scores does not support torch\.func transforms"):
        torch.func.grad(lambda v: F_itm.cross_attention_scores(queries.with_values(v), contexts).sum())(q.detach())
    with forward_ad.dual_level():
        dual = queries.with_values(forward_ad.make_dual(q.detach(), torch.ones_like(q)))
        with pytest.raises(RuntimeError, match=f"forward-mode differentiation: {advice}"):
            F_itm.cross_attention_scores(dual, contexts)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number, got nan"),
        ({"temperature": 1e39}, ValueError, "temperature: expected a number of at most 1e+30 in size, got 1e+39"),
        ({"temperature": 10**400}, ValueError, "temperature: expected a finite number, got inf"),
        (
            {"aggregation": "logsumexp", "logsumexp_temperature": 1e-46},
            ValueError,
            "logsumexp_temperature: expected a number other than 0, got 1e-46",
        ),
        ({"temperature": "9"}, TypeError, "temperature: expected a finite number, got '9' (str)"),
        ({"negative_slope": float("inf")}, ValueError, "negative_slope: expected a finite number, got inf"),
        (
            {"aggregation": "logsumexp", "logsumexp_temperature": 0},
            ValueError,
            "logsumexp_temperature: expected a number other than 0, got 0.0",
        ),
        ({"focal": "all"}, ValueError, "focal: expected one of None, 'equal', 'prob', 'hard', got 'all' (str)"),
        ({"aggregation": "median"}, ValueError, "aggregation: expected one of 'mean', 'sum', 'max', 'logsumexp'"),
        ({"normalization": "l3norm"}, ValueError, "normalization: expected one of 'clipped_l2norm', 'l2norm'"),
        (
            {"queries": torch.zeros(2, 4)},
            TypeError,
            "queries: expected Fragments, got a float32 tensor of shape (2, 4)",
        ),
        (
            {"contexts": random_fragments([2], 4, torch.float32)},
            TypeError,
            "contexts: expected the dtype of the queries, torch.float64, got torch.float32",
        ),
        (
            {"contexts": random_fragments([2], 5)},
            ValueError,
            "contexts: expected rows of width 4 like the queries, got 5",
        ),
        (
            {
                "contexts": Fragments(
                    torch.zeros(2, 4, dtype=torch.float64, device="meta"), torch.zeros(2, device="meta").int()
                )
            },
            ValueError,
            "contexts: expected it on cpu like queries, got meta",
        ),
    ],
)
def test_bad_arguments(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"queries": random_fragments([3], 4), "contexts": random_fragments([2], 4), **change}
    queries, contexts = arguments.pop("queries"), arguments.pop("contexts")
    with pytest.raises(error) as caught:
        F_itm.cross_attention_scores(queries, contexts, **arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_operator_itself_refuses_what_its_kernels_cannot_read() -> None:
    tensors = [random_fragments([2], 4).values, torch.tensor([0, 2])] * 2
    operator = torch.ops.itm_fast.cross_attention_scores
    with pytest.raises(RuntimeError, match="queries: expected float32, float64, bfloat16 or float16 values"):
        operator(tensors[0].long(), *tensors[1:], *OPTIONS)
    with pytest.raises(RuntimeError, match="contexts: expected int32 or int64 offsets"):
        operator(*tensors[:3], tensors[3].float(), *OPTIONS)
    with pytest.raises(RuntimeError, match="precision: unknown option 'int4'"):
        operator(*tensors, *OPTIONS[:-1], "int4")


def test_a_device_without_autocast_or_kernels_takes_the_packed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_warned", set())
    words, regions = (
        Fragments(torch.zeros(6, 4, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"), max_length=3)
        for _ in range(2)
    )
    with pytest.warns(itm_fast.FallbackWarning, match="no native kernel for device 'meta'"):
        use_native("cross_attention_scores", words.values)
    with without_autocast("meta"):
        assert (words.values @ regions.values.t()).shape == (6, 6)
    assert autocast(words, regions) == (words, regions)


def test_bfloat16_rows_are_never_copied_to_a_wider_type() -> None:
    """The peak memory of a step is below 1.5 times its gradients.

    float32 copies of words and regions would take twice the gradients.
    """
    sizes = workloads.Sizes(images=64, captions=64)
    peak = peak_memory(workloads.make_step, "native bf16", sizes, threads=1)
    words, regions = workloads.inputs(sizes)
    gradients = 2 * (words.values.numel() + regions.values.numel())
    assert (peak is None) == (sys.platform != "linux")
    assert peak is None or gradients < peak < 1.5 * gradients


def test_debug_checks_read_the_offsets() -> None:
    wrong = Fragments(torch.zeros(3, 4), torch.tensor([0, 2, 1, 3]), check=False)
    right = Fragments(torch.zeros(3, 4), torch.tensor([0, 3]), max_length=3)
    too_short = Fragments(torch.zeros(3, 4), torch.tensor([0, 3]), max_length=2)
    assert F_itm.cross_attention_scores(wrong, right).shape == (3, 1)
    itm_fast.debug_checks(True)
    try:
        with pytest.raises(ValueError, match="offsets: expected them never to fall, got 2 then 1 at 1"):
            F_itm.cross_attention_scores(wrong, right)
        with pytest.raises(
            ValueError, match=r"^max_length: expected at least 3, the length of the longest set, got 2$"
        ):
            F_itm.cross_attention_scores(too_short, right)
        assert F_itm.cross_attention_scores(right, right).shape == (1, 1)
    finally:
        itm_fast.debug_checks(False)


def test_the_fallback_gives_the_same_numbers_and_warns_once() -> None:
    """Without the native library, values and gradients equal the native ones up to rounding."""
    queries, contexts = (
        random_fragments([3, 0, 5], 6, torch.float32),
        random_fragments([4, 2], 6, torch.float32, seed=1),
    )
    q, c = queries.values.requires_grad_(), contexts.values.requires_grad_()
    scores = F_itm.cross_attention_scores(queries.with_values(q), contexts.with_values(c))
    scores.square().sum().backward()
    program = """
import sys, warnings, torch
sys.path.insert(0, ".")
from python_tests.helpers.fragments import random_fragments
import itm_fast, itm_fast.functional as F_itm
queries, contexts = random_fragments([3, 0, 5], 6, torch.float32), random_fragments([4, 2], 6, torch.float32, seed=1)
q, c = queries.values.requires_grad_(), contexts.values.requires_grad_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        scores = F_itm.cross_attention_scores(queries.with_values(q), contexts.with_values(c))
scores.square().sum().backward()
assert [w.category for w in caught] == [itm_fast.FallbackWarning], caught
print([part.flatten().tolist() for part in (scores, q.grad, c.grad)])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], env={"ITM_FAST_NATIVE": "0"}, capture_output=True, text=True, check=True
    )
    for native, plain in zip((scores, q.grad, c.grad), eval(result.stdout), strict=True):
        assert native.flatten().tolist() == pytest.approx(plain, abs=2e-6)
