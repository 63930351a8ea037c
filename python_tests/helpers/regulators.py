"""The regulators of RCAR number by number in plain Python floats: the reference for PyTorch code and kernels.

The computations do not use the package. Inside: `SETTINGS`, `random_parameters`, `hidden_widths`, `score_by_hand`,
`alignments_by_hand`, `philox_by_hand`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from itm_fast.functional import RegulatorParameters

Vector = list[float]
Rows = list[Vector]

# The form that RCAR's paper prints.
_PAPER = {"normalize_attended": False, "normalize_guidance": False}
# For each setting: the numbers of alignments, correspondences and aggregations, whether it has a score, and its
# options.
SETTINGS: dict[str, tuple[int, int, int, bool, dict[str, Any]]] = {
    "scan": (0, 0, 0, False, {}),
    "rcr1": (1, 1, 0, False, {}),
    "rcr3": (3, 3, 0, False, {}),
    "rcr2, no residual": (2, 2, 0, False, {"residual_correspondence": False}),
    "rcr2, query": (0, 2, 0, False, {"correspondence_input": "query"}),
    "rcr1, learned": (1, 1, 0, False, {"initial_factors": True}),
    "learned": (0, 0, 0, False, {"initial_factors": True}),
    "rar1": (1, 0, 1, True, {}),
    "rar3": (1, 0, 3, True, {}),
    "rar2, residual": (1, 0, 2, True, {"residual_aggregation": True}),
    "rar2, learned": (1, 0, 2, True, {"initial_factors": True}),
    "rcar2": (2, 1, 2, True, {}),
    "rcar3, tanh": (3, 2, 3, True, {"activation": "tanh"}),
    "rcar2, query": (2, 1, 2, True, {"correspondence_input": "query"}),
    "rcar2, residuals": (2, 1, 2, True, {"residual_correspondence": False, "residual_aggregation": True}),
    "sequential 2, 3": (3, 2, 3, True, {"schedule": "sequential"}),
    "sequential 1, 2": (2, 1, 2, True, {"schedule": "sequential"}),
    "mean": (1, 0, 0, True, {"activation": "tanh"}),
    "normalized mean": (1, 0, 0, True, {"activation": "tanh", "normalize_mean": True}),
    "rcr1, mean": (2, 1, 0, True, {}),
    "rar3, paper": (1, 0, 3, True, _PAPER),
    "rcar2, paper": (2, 1, 2, True, _PAPER),
    "sequential 2, 3, paper": (3, 2, 3, True, {**_PAPER, "schedule": "sequential"}),
    "rcar2, residuals, paper": (
        *(2, 1, 2, True),
        {**_PAPER, "residual_correspondence": False, "residual_aggregation": True},
    ),
    "rcr2, attended": (2, 2, 0, False, {"normalize_attended": False}),
    "rcar2, attended": (2, 1, 2, True, {"normalize_attended": False}),
    "mean, attended": (1, 0, 0, True, {"activation": "tanh", "normalize_mean": True, "normalize_attended": False}),
    "rar2, guidance": (1, 0, 2, True, {"normalize_guidance": False}),
    "rcar2, guidance": (2, 1, 2, True, {"normalize_guidance": False, "residual_aggregation": True}),
}


def random_parameters(
    setting: str, dim: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0, temperature: float = 4.0
) -> RegulatorParameters:
    """Draw random weights of a setting; the residual steps clamp some factors, but not all."""
    generator = torch.Generator().manual_seed(seed)
    aligned, corresponded, aggregated, scored, options = SETTINGS[setting]

    def tensor(*shape: int, scale: float = 0.6) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    seen = dim if options.get("correspondence_input") == "query" else width
    wide, narrow = 2 * width, max(width // 2, 1)
    options = dict(options)
    if options.pop("initial_factors", False):
        options["initial_factors"] = (tensor(dim, scale=0.3) + 0.5, tensor(1) + temperature)
    return RegulatorParameters(
        [(tensor(width, dim), tensor(width, scale=0.1)) for _ in range(aligned)],
        [
            (
                *(tensor(wide, seen), tensor(wide), tensor(dim, wide, scale=0.3), tensor(dim)),
                *(tensor(narrow, seen), tensor(narrow), tensor(1, narrow, scale=2.0), tensor(1) + 1.5),
            )
            for _ in range(corresponded)
        ],
        [
            (
                *(tensor(width, width), tensor(width)),
                *(tensor(width, width), tensor(width)),
                tensor(1, width),
                tensor(1),
            )
            for _ in range(aggregated)
        ],
        (tensor(1, width), tensor(1)) if scored else None,
        **options,
    )


def hidden_widths(parameters: RegulatorParameters, wide: int, narrow: int) -> RegulatorParameters:
    """Change the hidden widths of RCR from 2m and m/2: drop or repeat rows and columns of its weights."""

    def resized(tensor: Tensor, size: int, dim: int) -> Tensor:
        return tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])

    tensors: list[Tensor] = []
    for name, tensor in parameters.named_tensors():
        field, size = name.rsplit(".", 1)[1], None
        if name.startswith("correspondences") and field in ("w1", "b1", "w2"):
            size = wide
        elif name.startswith("correspondences") and field in ("w3", "b3", "w4"):
            size = narrow
        tensors.append(tensor if size is None else resized(tensor, size, 1 if field in ("w2", "w4") else 0))
    return parameters.with_tensors(tensors)


def _linear(weight: Tensor, bias: Tensor, x: Vector) -> Vector:
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
    ]


def _unit(x: Vector) -> Vector:
    norm = math.sqrt(sum(v * v for v in x)) + 1e-8
    return [v / norm for v in x]


def _softmax(x: Vector) -> Vector:
    powers = [math.exp(v - max(x)) for v in x]
    return [p / sum(powers) for p in powers]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _attend(query: Rows, context: Rows, channels: Rows, temperatures: Vector, options: dict[str, Any]) -> Rows:
    """Compute what each query attends to: steps 1 to 6 of the definition, with separate factors for each query."""
    if not context:
        return [[0.0] * len(q) for q in query]
    slope, mode = options.get("negative_slope", 0.1), options.get("normalization", "clipped_l2norm")
    raw = [
        [sum(e * a * b for e, a, b in zip(es, q, x, strict=True)) for x in context]
        for es, q in zip(channels, query, strict=True)
    ]
    if mode.startswith("clipped"):
        raw = [[s if s > 0 else slope * s for s in row] for row in raw]
    if mode.endswith("l2norm"):
        norms = [math.sqrt(sum(row[k] ** 2 for row in raw)) + 1e-8 for k in range(len(context))]
        raw = [[s / n for s, n in zip(row, norms, strict=True)] for row in raw]
    attended = []
    for row, temperature in zip(raw, temperatures, strict=True):
        p = _softmax([temperature * s for s in row])
        if options.get("focal") == "equal":
            kept = [value * len(p) > sum(p) for value in p]
        elif options.get("focal") == "prob":
            kept = [sum((value - other) * math.sqrt(other) for other in p) > 0 for value in p]
        else:
            kept = [True] * len(p)
        if any(kept):
            p = [value * keep for value, keep in zip(p, kept, strict=True)]
            p = [value / sum(p) for value in p]
        attended.append([sum(w * x[i] for w, x in zip(p, context, strict=True)) for i in range(len(context[0]))])
    return attended


def _align(query: Rows, attended: Rows, weights: Any, normalize: bool) -> Rows:
    return [
        _unit(_linear(*weights, [(a - b) ** 2 for a, b in zip(q, _unit(c) if normalize else c, strict=True)]))
        for q, c in zip(query, attended, strict=True)
    ]


def _correspond(seen: Vector, channels: Vector, temperature: float, w: Any, residual: bool) -> tuple[Vector, float]:
    hidden = [math.tanh(v) for v in _linear(w[0], w[1], seen)]
    change = [math.tanh(v) for v in _linear(w[2], w[3], hidden)]
    (shift,) = _linear(w[6], w[7], [math.tanh(v) for v in _linear(w[4], w[5], seen)])
    if residual:
        change, shift = [a + b for a, b in zip(change, channels, strict=True)], shift + temperature
    return [min(max(v, -1.0), 1.0) for v in change], max(shift, 0.0)


def philox_by_hand(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute Philox4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def _dropped(x: Vector, row: int, context: int, stream: int, options: dict[str, Any]) -> Vector:
    probability, seed = options.get("dropout", 0.0), options.get("seed", 0)
    if probability == 0:
        return x
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = [philox_by_hand((row, context, stream, i // 4), key)[i % 4] for i in range(len(x))]
    kept = [word >= math.floor(probability * 2**32) for word in words]
    return [value / (1 - probability) if keep else 0.0 for value, keep in zip(x, kept, strict=True)]


def _aggregate(aligned: Rows, guidance: Vector, step: int, options: dict[str, Any], p: RegulatorParameters) -> Vector:
    w = p.aggregations[step]
    first_row, number = options.get("place", (0, 0))
    guide = [math.tanh(v) for v in _linear(w[0], w[1], guidance)]
    guide = _dropped(guide, first_row, number, 2 * step + 1, options)
    logits = []
    for j, a in enumerate(aligned):
        local = _dropped([math.tanh(v) for v in _linear(w[2], w[3], a)], first_row + j, number, 2 * step, options)
        logits += _linear(w[4], w[5], [x * y for x, y in zip(guide, local, strict=True)])
    shares = _softmax(logits)
    gathered = [sum(s * a[i] for s, a in zip(shares, aligned, strict=True)) for i in range(len(guidance))]
    if p.residual_aggregation:
        gathered = [(x + y) / 2 for x, y in zip(guidance, gathered, strict=True)]
    return _unit(gathered) if p.normalize_guidance else gathered


def _mean(rows: Rows) -> Vector:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _chain(query: Rows, context: Rows, p: RegulatorParameters, options: dict[str, Any]) -> tuple[list[Rows], Rows]:
    """Return the alignments of each step and the result of one more attention."""
    channels = [[1.0] * len(q) for q in query]
    temperatures = [float(options["temperature"])] * len(query)
    if p.initial_factors is not None:
        channels = [p.initial_factors[0].tolist() for _ in query]
        temperatures = [float(p.initial_factors[1].detach())] * len(query)
    steps = []
    for step in range(max(len(p.alignments), len(p.correspondences))):
        if step < len(p.alignments):
            attended = _attend(query, context, channels, temperatures, options)
            steps.append(_align(query, attended, p.alignments[step], p.normalize_attended))
        if step < len(p.correspondences):
            seen = steps[-1] if p.correspondence_input == "alignment" else query
            factors = [
                _correspond(x, e, t, p.correspondences[step], p.residual_correspondence)
                for x, e, t in zip(seen, channels, temperatures, strict=True)
            ]
            channels, temperatures = [e for e, _ in factors], [t for _, t in factors]
    return steps, _attend(query, context, channels, temperatures, options)


def alignments_by_hand(query: Rows, context: Rows, p: RegulatorParameters, options: dict[str, Any]) -> Rows:
    """Compute the alignments after the last step."""
    return _chain(query, context, p, options)[0][-1]


def score_by_hand(query: Rows, context: Rows, p: RegulatorParameters, options: dict[str, Any]) -> float:
    """Compute the score of one pair.

    `options["place"]` holds the index of its first query row and the index of its context set.
    """
    if not query or not context:
        return 0.0
    steps, attended = _chain(query, context, p, options)
    if p.score is None:
        cosines = []
        for q, c in zip(query, attended, strict=True):
            norms = math.sqrt(sum(v * v for v in q)) * math.sqrt(sum(v * v for v in c))
            cosines.append(sum(a * b for a, b in zip(q, c, strict=True)) / max(norms, 1e-8))
        return sum(cosines) / len(cosines)
    if p.schedule == "interleaved" and p.correspondences and p.aggregations:
        guidance, seen = _mean(steps[0]), steps
    else:
        guidance, seen = _mean(steps[-1]), [steps[-1]] * len(p.aggregations)
    for step in range(len(p.aggregations)):
        guidance = _aggregate(seen[step], guidance, step, options, p)
    if p.normalize_mean:
        guidance = _unit(guidance)
    (value,) = _linear(*p.score, guidance)
    return _sigmoid(value) if p.activation == "sigmoid" else math.tanh(value)
