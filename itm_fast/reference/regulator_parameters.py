"""`RegulatorParameters`: weights and options of the correspondence (RCR) and aggregation (RAR) regulators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from itm_fast.reference import validation

__all__ = ["AggregationWeights", "AlignmentWeights", "CorrespondenceWeights", "RegulatorParameters"]

ACTIVATIONS = ("sigmoid", "tanh")
SCHEDULES = ("interleaved", "sequential")
CORRESPONDENCE_INPUTS = ("alignment", "query")


class AlignmentWeights(NamedTuple):
    """Weights of one alignment `l2norm(weight |q - l2norm(c)|^2 + bias)`: weight (m, d), bias (m,)."""

    weight: Tensor
    bias: Tensor


class CorrespondenceWeights(NamedTuple):
    """Weights of one RCR step. The input width is m (alignment) or d (query); the hidden widths are h = 2m, g = m/2."""

    w1: Tensor  # (h, m)
    b1: Tensor  # (h,)
    w2: Tensor  # (d, h)
    b2: Tensor  # (d,)
    w3: Tensor  # (g, m)
    b3: Tensor  # (g,)
    w4: Tensor  # (1, g)
    b4: Tensor  # (1,)


class AggregationWeights(NamedTuple):
    """Weights of one RAR step: `v^T(drop(tanh(a guidance + alpha)) * drop(tanh(b alignment + beta))) + c`."""

    a: Tensor  # (m, m)
    alpha: Tensor  # (m,)
    b: Tensor  # (m, m)
    beta: Tensor  # (m,)
    v: Tensor  # (1, m)
    c: Tensor  # (1,)


class ScoreWeights(NamedTuple):
    """Weights of the score `activation(u^T guidance + u0)`."""

    u: Tensor  # (1, m)
    u0: Tensor  # (1,)


class FactorWeights(NamedTuple):
    """Learned factors of the first attention."""

    channels: Tensor  # (d,)
    temperature: Tensor  # (1,)


Group = TypeVar("Group", bound=tuple[Any, ...])


class RegulatorParameters:
    """Weights of `itm_fast.functional.regulated_scores`. The number of weights of each kind selects the model.

    - Only RCR: no `score` and as many `alignments` as `correspondences` (no alignments if the correspondences see the
      query). The score is the mean cosine of the last attention.
    - No weights: SCAN with mean aggregation.
    - Only RAR: one alignment, any number of `aggregations`, and the `score`.
    - RCR and RAR, schedule "interleaved": N alignments, N - 1 correspondences, N aggregations, and the `score`.
    - RCR and RAR, schedule "sequential": N alignments, N - 1 correspondences, any number of aggregations after the last
      attention, and the `score`.
    - A `score` without aggregations: score the mean of the last alignments.

    Args:
        alignments: one `(weight (m, d), bias (m,))` for each aligned attention.
        correspondences: one `(W1 (2m, m), b1, W2 (d, 2m), b2, W3 (m/2, m), b3, w4 (1, m/2), b4)` for each step; other
            hidden widths are allowed.
        aggregations: one `(A (m, m), alpha (m,), B (m, m), beta (m,), v (1, m), c (1,))` for each step.
        score: `(u (1, m), u0 (1,))`, or None.
        activation: activation of the score, "sigmoid" or "tanh".
        normalize_mean: l2-normalize the mean alignment before scoring; only without aggregations.
        schedule: "interleaved" or "sequential".
        residual_correspondence: add the output of each RCR step to the previous factors (as in the paper), or replace
            them.
        residual_aggregation: average the output of each RAR step with the previous guidance (not in the paper).
        correspondence_input: input of RCR: the "alignment" (as in the paper) or the "query". With "query", W1 and W3
            have input width d.
        initial_factors: learned `(e (d,), lambda (1,))` of the first attention. None: ones, and the `temperature` of
            the call.
        normalize_attended: l2-normalize attended vectors in Eq 7 (authors' code), or not (paper).
        normalize_guidance: l2-normalize the output of each RAR step, Eq 16 (authors' code), or not (paper).

    Raises:
        TypeError: an argument is not a floating point tensor, or the dtypes differ.
        ValueError: numbers of steps or shapes are inconsistent, devices differ, or an option is unknown.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> scan = F_itm.RegulatorParameters()  # no weights: SCAN with the mean
        >>> len(scan.tensors())
        0
        >>> alignments = [(torch.randn(16, 32), torch.zeros(16))]
        >>> baseline = F_itm.RegulatorParameters(alignments, score=(torch.randn(1, 16), torch.zeros(1)))
        >>> [tuple(tensor.shape) for tensor in baseline.tensors()]
        [(16, 32), (16,), (1, 16), (1,)]

    Source: Diao et al., "Plug-and-Play Regulators for Image-Text Matching" (IEEE TIP 2023), Eq 7 to 18, Algorithm 1,
    Tables III and VIII.
    """

    def __init__(
        self,
        alignments: Sequence[Sequence[Tensor]] = (),
        correspondences: Sequence[Sequence[Tensor]] = (),
        aggregations: Sequence[Sequence[Tensor]] = (),
        score: Sequence[Tensor] | None = None,
        *,
        activation: str = "sigmoid",
        normalize_mean: bool = False,
        schedule: str = "interleaved",
        residual_correspondence: bool = True,
        residual_aggregation: bool = False,
        correspondence_input: str = "alignment",
        initial_factors: Sequence[Tensor] | None = None,
        normalize_attended: bool = True,
        normalize_guidance: bool = True,
    ) -> None:
        self.alignments = _groups("alignments", alignments, AlignmentWeights)
        self.correspondences = _groups("correspondences", correspondences, CorrespondenceWeights)
        self.aggregations = _groups("aggregations", aggregations, AggregationWeights)
        self.score = None if score is None else _group("score", score, ScoreWeights)
        self.initial_factors = (
            None if initial_factors is None else _group("initial_factors", initial_factors, FactorWeights)
        )
        validation.check_option("activation", activation, ACTIVATIONS)
        validation.check_option("schedule", schedule, SCHEDULES)
        validation.check_option("correspondence_input", correspondence_input, CORRESPONDENCE_INPUTS)
        validation.check_flag("normalize_mean", normalize_mean)
        validation.check_flag("residual_correspondence", residual_correspondence)
        validation.check_flag("residual_aggregation", residual_aggregation)
        validation.check_flag("normalize_attended", normalize_attended)
        validation.check_flag("normalize_guidance", normalize_guidance)
        self.activation = activation
        self.normalize_mean = normalize_mean
        self.schedule = schedule
        self.residual_correspondence = residual_correspondence
        self.residual_aggregation = residual_aggregation
        self.correspondence_input = correspondence_input
        self.normalize_attended = normalize_attended
        self.normalize_guidance = normalize_guidance
        self._check_steps()
        self._check_shapes()

    def _check_steps(self) -> None:
        aligned, corresponded, aggregated = (
            len(group) for group in (self.alignments, self.correspondences, self.aggregations)
        )
        if aggregated and self.score is None:
            raise ValueError(
                f"score: expected the layer (u, u0) that scores what {aggregated} aggregations give, got None"
            )
        if self.normalize_mean and (aggregated or self.score is None):
            raise ValueError("normalize_mean: expected it with a score and without aggregations alone")
        expected = corresponded + 1
        if self.score is None:
            expected = corresponded if self.correspondence_input == "alignment" else 0
        if aligned != expected:
            kind = "mean cosine" if self.score is None else "learned"
            raise ValueError(
                f"alignments: expected {expected} for {corresponded} correspondences and a {kind} score, got {aligned}"
            )
        if self.interleaved and aggregated != aligned:
            raise ValueError(
                f"aggregations: expected {aligned}, one for each alignment, as the schedule is interleaved, "
                f"got {aggregated}"
            )

    def _check_shapes(self) -> None:
        named = dict(self.named_tensors())
        if not named:
            return
        first_name, first = next(iter(named.items()))
        for name, tensor in named.items():
            if tensor.dtype != first.dtype:
                raise TypeError(f"{name}: expected the dtype of {first_name}, {first.dtype}, got {tensor.dtype}")
            validation.check_same_device(name, tensor, first_name, first)
            if validation.debugging() and tensor.device.type != "meta" and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name}: expected finite values, got NaN or infinite ones")
        sizes: dict[str, int] = {}
        for name, letters in self._shapes():
            for letter, size in zip(letters, named[name].shape, strict=True):
                expected = 1 if letter == "1" else sizes.setdefault(letter, size)
                if size != expected:
                    shape = tuple(1 if part == "1" else sizes.get(part, part) for part in letters)
                    raise ValueError(
                        f"{name}: expected shape {shape} like the tensors before it, got {tuple(named[name].shape)}"
                    )

    def _shapes(self) -> Iterable[tuple[str, str]]:
        """Yield the name of each tensor and its shape as letters; equal letters mean equal sizes."""
        for index in range(len(self.alignments)):
            yield from _named(f"alignments[{index}]", AlignmentWeights, ("md", "m"))
        seen = "m" if self.correspondence_input == "alignment" else "d"
        for index in range(len(self.correspondences)):
            # Hidden widths may differ between steps, so each step uses its own letters.
            wide, narrow = chr(0x100 + index), chr(0x1000 + index)
            shapes = (wide + seen, wide, "d" + wide, "d", narrow + seen, narrow, "1" + narrow, "1")
            yield from _named(f"correspondences[{index}]", CorrespondenceWeights, shapes)
        for index in range(len(self.aggregations)):
            yield from _named(f"aggregations[{index}]", AggregationWeights, ("mm", "m", "mm", "m", "1m", "1"))
        if self.score is not None:
            yield from _named("score", ScoreWeights, ("1m", "1"))
        if self.initial_factors is not None:
            yield from _named("initial_factors", FactorWeights, ("d", "1"))

    @property
    def interleaved(self) -> bool:
        """Whether aggregations take turns with correspondences."""
        return self.schedule == "interleaved" and len(self.correspondences) > 0 and len(self.aggregations) > 0

    @property
    def embed_dim(self) -> int | None:
        """Width d of the query and context rows, or None without weights (any width is accepted)."""
        if self.initial_factors is not None:
            return self.initial_factors.channels.shape[0]
        if self.alignments:
            return self.alignments[0].weight.shape[1]
        return self.correspondences[0].w2.shape[0] if self.correspondences else None

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return every tensor with its name, such as `correspondences[0].w1`, in the order of the fields."""
        return zip((name for name, _ in self._shapes()), self.tensors(), strict=True)

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in the order of `named_tensors`."""
        groups = [*self.alignments, *self.correspondences, *self.aggregations]
        groups += [group for group in (self.score, self.initial_factors) if group is not None]
        return list(chain.from_iterable(groups))

    def with_tensors(self, tensors: Iterable[Tensor]) -> RegulatorParameters:
        """Return a copy with the same options and other tensors, given in the order of `tensors()`."""
        rest = iter(tensors)

        def taken(group: tuple[Tensor, ...]) -> list[Tensor]:
            return [next(rest) for _ in group]

        return RegulatorParameters(
            [taken(group) for group in self.alignments],
            [taken(group) for group in self.correspondences],
            [taken(group) for group in self.aggregations],
            None if self.score is None else taken(self.score),
            activation=self.activation,
            normalize_mean=self.normalize_mean,
            schedule=self.schedule,
            residual_correspondence=self.residual_correspondence,
            residual_aggregation=self.residual_aggregation,
            correspondence_input=self.correspondence_input,
            initial_factors=None if self.initial_factors is None else taken(self.initial_factors),
            normalize_attended=self.normalize_attended,
            normalize_guidance=self.normalize_guidance,
        )

    def to(self, *args: Any, **kwargs: Any) -> RegulatorParameters:
        """Return a copy with `Tensor.to` applied to every tensor."""
        return self.with_tensors([tensor.to(*args, **kwargs) for tensor in self.tensors()])

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the tensors, or None without tensors."""
        tensors = self.tensors()
        return tensors[0].dtype if tensors else None


def _named(prefix: str, kind: Any, shapes: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((f"{prefix}.{name}", shape) for name, shape in zip(kind._fields, shapes, strict=True))


def _groups(name: str, groups: Any, kind: Callable[..., Group]) -> tuple[Group, ...]:
    if not isinstance(groups, list | tuple):
        raise TypeError(f"{name}: expected a list, one entry per step, got {validation.describe(groups)}")
    return tuple(_group(f"{name}[{index}]", group, kind) for index, group in enumerate(groups))


def _group(name: str, group: Any, kind: Any) -> Any:
    fields: tuple[str, ...] = kind._fields
    wanted = f"({', '.join(fields)})"
    if not isinstance(group, list | tuple):
        raise TypeError(f"{name}: expected the tensors {wanted}, got {validation.describe(group)}")
    if len(group) != len(fields):
        raise ValueError(f"{name}: expected the tensors {wanted}, got {len(group)}")
    for field, tensor in zip(fields, group, strict=True):
        validation.check_tensor(f"{name}.{field}", tensor, _DIMENSIONS[kind][field])
    return kind(*group)


_DIMENSIONS: dict[Any, dict[str, tuple[str, ...]]] = {
    AlignmentWeights: {"weight": ("m", "d"), "bias": ("m",)},
    CorrespondenceWeights: {
        "w1": ("2m", "m"), "b1": ("2m",), "w2": ("d", "2m"), "b2": ("d",),
        "w3": ("m/2", "m"), "b3": ("m/2",), "w4": ("1", "m/2"), "b4": ("1",),
    },
    AggregationWeights: {
        "a": ("m", "m"), "alpha": ("m",), "b": ("m", "m"), "beta": ("m",), "v": ("1", "m"), "c": ("1",),
    },
    ScoreWeights: {"u": ("1", "m"), "u0": ("1",)},
    FactorWeights: {"channels": ("d",), "temperature": ("1",)},
}  # fmt: skip
