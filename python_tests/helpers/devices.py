"""Operators on any device: their test inputs, and tools that watch and control the device while they run.

Inside: `DEVICES`, `CASES`, `each_case`, `each_case_of_a_gpu`, `each_device`, `inputs_of`, `run_case`.
`no_synchronization`, `another_stream` and `captured` act on a CUDA device and have no effect on the CPU. `launched`,
`kernel_names` and `names_on_device` list what ran on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from itm_fast import Fragments
from itm_fast.ops.library import operators_of
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import random_parameters
from python_tests.helpers.triplet_cases import MINING, random_scores

Inputs = list[Tensor]


@dataclass(frozen=True)
class Case:
    """An operator with options: `call(functions, inputs)` for functions like `itm_fast.functional`.

    The first `differentiable` inputs have a gradient. The `sizes` are run one after the other in one process.
    """

    name: str
    operators: tuple[str, ...]
    make: Callable[[int, int], Inputs]  # seed and size -> float64 and index tensors on the CPU
    call: Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]
    differentiable: int
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    sizes: tuple[int, ...] = (6, 1, 70, 9)

    @property
    def scores(self) -> bool:
        """Whether the operator compares vectors: these may have 16 bits, and sums of many terms round."""
        of_attention = self.operators[0] in ("cross_attention_scores", "matching_loss", "maxsim_scores")
        return of_attention or self.widened or self.takes_any_dtype

    @property
    def takes_any_dtype(self) -> bool:
        """Whether the kernels read vectors in their own dtype, also under autocast."""
        return self.operators[0] == "domain_regularization"

    @property
    def widened(self) -> bool:
        """Whether the kernels get 16-bit vectors as float32, with their precision as an argument."""
        return self.operators[0] in ("regulated_scores", "cross_attention_alignments")


def _sets(seed: int, size: int, dim: int, longest: tuple[int, int], offsets: torch.dtype) -> Inputs:
    """Draw `size` captions of 1 to 17 words and `size` images of 1 to 40 regions.

    Each side gets two more sets: one of the longest size and an empty one.
    """
    lengths = torch.randint(1, 18, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    counts = torch.randint(1, 41, (size,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    words = random_fragments([*lengths, longest[0], 0], dim, seed=seed)
    regions = random_fragments([*counts, longest[1], 0], dim, seed=seed + 2)
    return [words.values, regions.values, words.offsets.to(offsets), regions.offsets.to(offsets)]


def _scores_case(
    name: str,
    *,
    dim: int = 40,
    longest: tuple[int, int] = (17, 40),
    offsets: torch.dtype = torch.int64,
    sizes: tuple[int, ...] = (6, 1, 14, 5),
    **options: Any,
) -> Case:
    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        words, regions, word_offsets, region_offsets = inputs
        queries = Fragments(words, word_offsets, check=False, max_length=longest[0])
        contexts = Fragments(regions, region_offsets, check=False, max_length=longest[1])
        return (functions.cross_attention_scores(queries, contexts, **options),)

    operators = ("cross_attention_scores", "cross_attention_scores_backward")
    make = partial(_sets, dim=dim, longest=longest, offsets=offsets)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(f"cross_attention_scores {name}", operators, make, call, 2, dtypes, sizes)


def _maxsim_case(
    name: str, *, listed: bool = False, dim: int = 40, longest: tuple[int, int] = (17, 40), **options: Any
) -> Case:
    """Make a case of all pairs, or of listed pairs in random order with repetitions."""

    def make(seed: int, size: int) -> Inputs:
        drawn = torch.randint(size + 2, (3 * size, 2), generator=torch.Generator().manual_seed(seed))
        return [*_sets(seed, size, dim, longest, torch.int64), drawn]

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        words, regions, word_offsets, region_offsets, drawn = inputs
        queries = Fragments(words, word_offsets, check=False, max_length=longest[0])
        contexts = Fragments(regions, region_offsets, check=False, max_length=longest[1])
        pairs = drawn if listed else None
        return (functions.maxsim_scores(queries, contexts, pairs=pairs, **options),)

    operators = ("maxsim_scores", "maxsim_scores_backward")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(f"maxsim_scores {name}", operators, make, call, 2, dtypes, (6, 1, 14))


def _regulated_case(
    name: str,
    setting: str,
    *,
    dim: int = 40,
    width: int = 16,
    sizes: tuple[int, ...] = (6, 1, 70, 9),
    lengths: tuple[list[int], list[int]] | None = None,
    **options: Any,
) -> Case:
    """Make a case with gradients of both sides. Those of the weights have tests of their own.

    With `lengths` of queries and contexts, the sets do not depend on the size.
    """
    alignments = options.pop("alignments", False)
    longest = (17, 40) if lengths is None else (max(lengths[0]), max(lengths[1]))

    def make(seed: int, size: int) -> Inputs:
        weights = random_parameters(setting, dim, width, seed=seed).tensors()
        sets = _sets(seed, size, dim, longest, torch.int64)
        if lengths is not None:
            sides = [random_fragments(of, dim, seed=seed + i) for i, of in enumerate(lengths)]
            sets = [*(side.values for side in sides), *(side.offsets for side in sides)]
        # The seed is on the device: a seed on the host would cause a synchronisation.
        return [*sets, torch.tensor([seed + 2**40]), *weights]

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        words, regions, word_offsets, region_offsets, seed, *weights = inputs
        queries = Fragments(words, word_offsets, check=False, max_length=longest[0])
        contexts = Fragments(regions, region_offsets, check=False, max_length=longest[1])
        parameters = random_parameters(setting, dim, width).with_tensors(weights)
        if not alignments:
            return (functions.regulated_scores(queries, contexts, parameters, seed=seed, **options),)
        groups = [list(group) for group in zip(*parameters.alignments, strict=True)]
        rest = {"correspondences": parameters.correspondences, **options}
        return (functions.cross_attention_alignments(queries, contexts, *groups, **rest),)

    operator = "cross_attention_alignments" if alignments else "regulated_scores"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(f"{operator} {name}", (operator, f"{operator}_backward"), make, call, 2, dtypes, sizes)


def _step_case(name: str, reduction: str, loss: tuple[str, str]) -> Case:
    """Make a case of scores and their loss over hardest negatives, differentiated with respect to words and regions."""
    of_scores = _scores_case(name, sizes=(5,))

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (scores,) = of_scores.call(functions, inputs)
        return (functions.triplet_loss(scores.t(), mining="hardest", reduction=reduction),)

    return replace(of_scores, name=name, operators=(*of_scores.operators, *loss), call=call)


def _matching_case(attention: str, loss: str, mining: str) -> Case:
    """Make a case of scores and loss in one call, both with an incoming gradient."""

    def make(seed: int, size: int) -> Inputs:
        anchor = random_scores(size + 2, seed=seed + 3).bfloat16().double()  # Exact in every dtype.
        return [*_sets(seed, size, 40, (17, 40), torch.int64), anchor]

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        words, regions, word_offsets, region_offsets, anchor = inputs
        captions = Fragments(words, word_offsets, check=False, max_length=17)
        images = Fragments(regions, region_offsets, check=False, max_length=40)
        sides = (images, captions) if attention == "i2t" else (captions, images)
        wide = anchor.to(torch.promote_types(anchor.dtype, torch.float32))
        options = {"anchor_scores": wide, "strategy": "both"} if loss == "boosting" else {"epsilon": 0.3}
        if attention in ("sum", "mean"):
            options["other_direction"] = {"temperature": 4.0, "normalization": "softmax"}
        results: tuple[Tensor, ...] = functions.matching_loss(
            *sides, attention=attention, loss=loss, mining=mining, reduction="mean", **options
        )
        return results

    operators = ("matching_loss", "scale_gradient", "cross_attention_scores_backward")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(f"matching_loss {attention} {loss} {mining}", operators, make, call, 2, dtypes, (6, 1, 14))


def past_the_room(rows: int = 100) -> Case:
    """Make a case with sets of `rows` rows on both sides.

    With 60 sets, the CUDA backward takes the pairs in many chunks.
    """

    def make(seed: int, size: int) -> Inputs:
        sides = [random_fragments([rows] * size, 8, seed=seed + i) for i in range(2)]
        return [*(side.values for side in sides), *(side.offsets for side in sides)]

    return replace(_scores_case("past the room", longest=(rows, rows)), make=make)


def _triplet_case(mining: str) -> Case:
    return Case(
        f"triplet_loss {mining}",
        ("triplet_loss", "triplet_loss_backward"),
        lambda seed, size: [random_scores(size, seed=seed)],
        lambda functions, inputs: (functions.triplet_loss(inputs[0], mining=mining, epsilon=0.3, reduction="none"),),
        1,
    )


def _boosting_case(strategy: str, mining: str) -> Case:
    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (functions.boosting_loss(*inputs, strategy=strategy, mining=mining, reduction="none"),)

    def make(seed: int, size: int) -> Inputs:
        return [random_scores(size, seed=seed), random_scores(size, seed=seed + 1)]

    return Case(f"boosting_loss {strategy} {mining}", ("boosting_loss", "boosting_loss_backward"), make, call, 1)


def _one_launch_case(name: str, mining: str) -> Case:
    """Make a case of one scalar loss, which is computed together with its gradient."""

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        options = {"epsilon": 0.3} if name == "triplet_loss" else {"strategy": "both", "soft": True}
        return (getattr(functions, name)(*inputs, mining=mining, reduction="mean", **options),)

    def make(seed: int, size: int) -> Inputs:
        return [random_scores(size, seed=seed + i) for i in range(1 if name == "triplet_loss" else 2)]

    return Case(f"{name} {mining} in one launch", (f"{name}_with_gradient", "scale_gradient"), make, call, 1)


def _domain_case(name: str, with_negatives: bool, **options: Any) -> Case:
    """Make a case of the risks of `size` pairs, with or without negatives.

    Two pairs are added: one of long sets and one of empty sets.
    """

    def make(seed: int, size: int) -> Inputs:
        words, regions, word_offsets, region_offsets = _sets(seed, size, 37, (70, 90), torch.int64)
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(size + 2, 37, generator=generator, dtype=torch.float64)
        biases = torch.randn(size + 2, generator=generator, dtype=torch.float64)
        negatives = torch.randint(-1, size + 2, (2, size + 2), generator=generator)
        return [weights, biases, regions, words, region_offsets, word_offsets, *negatives.unbind()]

    def call(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        weights, biases, regions, words, region_offsets, word_offsets, *negatives = inputs
        sides = [Fragments(regions, region_offsets, check=False), Fragments(words, word_offsets, check=False)]
        given = negatives if with_negatives else ()
        results: tuple[Tensor, ...] = functions.domain_regularization(*sides, weights, biases, *given, **options)
        return results

    operators = ("domain_regularization", "domain_regularization_backward")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Case(f"domain_regularization {name}", operators, make, call, 4, dtypes, (6, 1, 30))


def _hardest(functions: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    rows, columns = functions.hardest_negatives(inputs[0])
    return (*rows, *columns)


def _gallery(seed: int, size: int) -> Inputs:
    n_images = max(1, size // 5)
    return [random_scores(n_images, size, seed=seed), torch.arange(size) % n_images]


# The loss is a scalar and is computed together with its gradient.
ONE_LAUNCH_STEP = _step_case(
    "step with one launch for the loss", "sum", ("triplet_loss_with_gradient", "scale_gradient")
)
CASES = (
    _scores_case("default"),
    _scores_case("softmax", normalization="softmax", temperature=4.0, aggregation="sum"),
    _scores_case("l1norm focal", normalization="l1norm", focal="equal", aggregation="max"),
    _scores_case("logsumexp focal", normalization="clipped", focal="prob", aggregation="logsumexp"),
    _scores_case("hard", normalization="no_norm", temperature=1.0, focal="hard", aggregation="logsumexp"),
    # The staged copies wrap around their ring buffer, and rows start at any alignment.
    _scores_case("wide", dim=520, sizes=(5,)),
    _scores_case("odd width", dim=37, offsets=torch.int32, sizes=(5,)),
    _scores_case("long sets", longest=(150, 300), focal="prob", sizes=(3,)),
    _maxsim_case("of all pairs", direction="both"),
    _maxsim_case("of listed pairs", listed=True, dim=37, longest=(150, 200), reduction="mean", direction="contexts"),
    _regulated_case("of both regulators", "rcar2", dropout=0.4),
    _regulated_case("of both regulators as printed", "rcar2, paper", dropout=0.4),
    _regulated_case("of RCR alone", "rcr3", focal="prob"),
    _regulated_case("of RAR alone, wide", "rar3", dim=600, width=150, sizes=(6, 1)),
    _regulated_case("of long sets", "rcar2", sizes=(1,), lengths=([120], [196])),
    _regulated_case("after a step of RCR", "rcar2", normalization="softmax", alignments=True),
    _step_case("step", "none", ("triplet_loss", "triplet_loss_backward")),
    ONE_LAUNCH_STEP,
    *map(_triplet_case, MINING),
    *(_boosting_case(*options) for options in product(("absolute", "relative", "both"), ("hardest", "all"))),
    *(_one_launch_case("triplet_loss", mining) for mining in MINING),
    *(_one_launch_case("boosting_loss", mining) for mining in ("hardest", "all")),
    _matching_case("t2i", "triplet", "hardest"),
    _matching_case("i2t", "triplet", "selective"),
    _matching_case("t2i", "boosting", "all"),
    _matching_case("sum", "triplet", "hardest"),
    Case(
        "hardest_negatives",
        ("hardest_negatives", "hardest_negatives_backward"),
        lambda seed, size: [random_scores(size, seed=seed)],
        _hardest,
        1,
    ),
    _domain_case("with negatives", with_negatives=True, margin=3.0, aggregation="mean"),
    _domain_case("without negatives", with_negatives=False),
    Case("retrieval_ranks", ("retrieval_ranks",), _gallery, lambda functions, x: functions.retrieval_ranks(*x), 0),
)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def built(operators: Iterable[str], device: str) -> bool:
    """Whether all these operators have a kernel for this device type."""
    return set(operators) <= operators_of(device)


MARKS = {"cpu": (), "cuda": (pytest.mark.cuda,)}
each_device = pytest.mark.parametrize("device", [pytest.param(device, marks=MARKS[device]) for device in DEVICES])


def on_devices(
    *devices: str, cases_on_the_cpu: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each of these devices, with every case that has its kernels there, or with the first ones."""
    parameters = [
        pytest.param(device, case, marks=MARKS[device], id=f"{device} {case.name}".replace(" ", "-"))
        for device in devices
        for case in (CASES[:cases_on_the_cpu] if device == "cpu" else CASES)
        if built(case.operators, device)
    ]
    return pytest.mark.parametrize(("device", "case"), parameters)


each_case = on_devices(*DEVICES)
# For what only a GPU has, such as streams: one case on the CPU shows that the test itself works.
each_case_of_a_gpu = on_devices(*DEVICES, cases_on_the_cpu=1)


def inputs_of(case: Case, seed: int, size: int, dtype: torch.dtype, device: str) -> Inputs:
    """Make inputs in a dtype on a device. The exact results are those of the rounded inputs in float64."""
    made = case.make(seed, size)
    return [part.to(device, dtype if part.is_floating_point() else part.dtype) for part in made]


def run_case(functions: Any, case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, then the gradients for fixed weights of every floating-point result."""
    leaves = [part.detach().requires_grad_(i < case.differentiable) for i, part in enumerate(inputs)]
    results = case.call(functions, leaves)
    found = [part.detach() for part in results]
    if case.differentiable:
        floating = [part for part in results if part.requires_grad]
        weights = [
            torch.linspace(0.5, 1.5, p.numel(), device=p.device, dtype=p.dtype).reshape(p.shape) for p in floating
        ]
        found += torch.autograd.grad(floating, leaves[: case.differentiable], weights)
    return found


@contextlib.contextmanager
def no_synchronization(device: str) -> Iterator[None]:
    """Make every operation that synchronises with the GPU an error."""
    if device == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def another_stream(device: str) -> Iterator[None]:
    """Run in a second stream that starts with a delay, so that work in a wrong stream runs too early."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # Clock cycles: tens of milliseconds.
        yield
    torch.cuda.synchronize()


def captured(device: str, call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Capture `call` as a CUDA graph; replay it on inputs changed in place. On the CPU, return `call` itself."""
    if device == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return [part.clone() for part in results]

    return replay


def names_on_device(events: Iterable[Any]) -> list[str]:
    """List the GPU events of a profile in order: kernels, "Memcpy ..." and "Memset ..."."""
    return [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


def kernel_names(events: Iterable[Any]) -> list[str]:
    """List the kernels of a profile in order."""
    return [name for name in names_on_device(events) if not name.startswith(("Memcpy", "Memset"))]


def launched(call: Callable[[], Any], names: Callable[[Iterable[Any]], list[str]] = kernel_names) -> list[str]:
    """List what a call does on the GPU after a warm-up call: its kernels, or other `names` of the profile."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return names(profile.events())
