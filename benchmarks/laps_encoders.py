"""Measure training steps of LAPS with its encoders, a ViT base and a BERT base, and count the memory that does not fit.

`python -m benchmarks.laps --encoders` runs it.

Inside: `Sizes`, `VARIANTS`, `make_step`, `counted`, `run`, `markdown`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from benchmarks import laps
from benchmarks.machine import kept_bytes, processor_time
from benchmarks.saved_memory import saved_bytes, without_memory
from itm_fast import Fragments, models
from itm_fast.benchmarking.measure import interleave, peak_memory, reset_peak, status_bytes
from itm_fast.benchmarking.table import megabytes, table
from itm_fast.benchmarking.table import time as described_time
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["VARIANTS", "Sizes", "counted", "make_step", "markdown", "run"]

LOOP, BOTH = "published loop", "both"
# For each variant: how pairs are scored, and whether the encoders take micro-batches.
VARIANTS: Mapping[str, tuple[str, bool]] = {
    LOOP: ("loop over captions", False),
    "all pairs at once": ("all pairs at once", False),
    "gradient sparsity": ("itm_fast", False),
    "micro-batches": ("all pairs at once", True),
    BOTH: ("itm_fast", True),
}
_BYTES = 4  # of a float32


@attrs.frozen
class Sizes:
    """Sizes of both encoders and of the joint space; the defaults are ViT-B/16 at 224 pixels and BERT base."""

    side: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    words: int = 30522
    dim: int = laps.DIM

    @property
    def patches(self) -> int:
        """Return the patches of a picture."""
        return (self.side // self.patch) ** 2


SMALL = Sizes(side=32, width=24, layers=2, heads=2, hidden=48, words=60, dim=16)


def make_model(sizes: Sizes) -> models.MatchingModel:
    """Create LAPS with random weights. It has no dropout, so that gradients of all variants can be compared."""
    from transformers import ViTConfig

    from itm_fast.nn.vision_backbone import backbone_settings

    vit = ViTConfig(
        image_size=sizes.side, patch_size=sizes.patch, hidden_size=sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, intermediate_size=sizes.hidden,
    )  # fmt: skip
    torch.manual_seed(0)
    return models.create(
        "laps", vocab_size=sizes.words, feature_dim=3 * sizes.patch**2, n_regions=sizes.patches, embed_dim=sizes.dim,
        image_encoder="backbone",
        image_backbone={"config": backbone_settings("vit", vit), "mean": [0.5] * 3, "std": [0.5] * 3},
        text_encoder="bert", bert_dim=sizes.width, bert_layers=sizes.layers, bert_heads=sizes.heads,
        bert_hidden_dim=sizes.hidden, bert_dropout=0.0,
    ).train()  # fmt: skip


def lengths_of(batch: int) -> Tensor:
    """Return the lengths of captions, int64 (batch,)."""
    return torch.randint(laps.WORDS.start, laps.WORDS.stop, (batch,), generator=torch.Generator().manual_seed(0))


def make_inputs(sizes: Sizes, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures as patches, token ids and lengths, all random."""
    generator = torch.Generator().manual_seed(0)
    features = 2 * torch.rand(batch, sizes.patches, 3 * sizes.patch**2, generator=generator) - 1
    lengths = lengths_of(batch)
    ids = torch.randint(1, sizes.words, (batch, int(lengths.max())), generator=generator)
    return features, ids, lengths


def step_of(model: Any, inputs: tuple[Tensor, Tensor, Tensor], form: str, micro_batch: int | None) -> Tensor:
    """Encode, score, compute the hardest-negative loss and all gradients; return the scores."""
    model.zero_grad(set_to_none=True)
    images, captions = model.encode(*inputs, micro_batch)
    scores = laps.FORMS[form](model.similarity, images, captions)
    F_itm.triplet_loss(scores, margin=0.2, mining="hardest").backward()
    return scores.detach()


def make_step(
    form: str, sizes: Sizes, batch: int, micro_batch: int | None, small: bool = False
) -> Callable[[], Tensor]:
    """Return a call of `step_of` on a new model."""
    if small:
        sizes, batch, micro_batch = SMALL, 2, micro_batch and 1
    return partial(step_of, make_model(sizes), make_inputs(sizes, batch), form, micro_batch)


def encoder_bytes(model: Any, sizes: Sizes, batch: int) -> tuple[int, int]:
    """Count what the encoders of pictures and of captions keep for the backward pass of a batch."""
    known = list(model.parameters())
    with without_memory() as mode:
        pictures = torch.empty(batch, sizes.patches, 3 * sizes.patch**2)
        found = saved_bytes(lambda: model.encode_images(pictures), [*known, *map(mode.from_tensor, known)])
    # The length of the longest caption decides shapes, so captions need values.
    _, ids, lengths = make_inputs(attrs.evolve(sizes, side=sizes.patch), batch)
    return found, saved_bytes(lambda: model.encode_captions(ids, lengths), known)


def score_bytes(model: Any, sizes: Sizes, batch: int, form: str) -> int:
    """Count what scores without gradient sparsity keep for the backward pass, patches and words included."""
    lengths = lengths_of(batch).tolist()
    module, offsets = model.similarity, torch.tensor([0, *lengths]).cumsum(0)
    with without_memory() as mode:
        known = [*module.parameters(), *map(mode.from_tensor, module.parameters())]
        patches = torch.empty(batch * sizes.patches, sizes.dim, requires_grad=True)
        words = torch.empty(sum(lengths), sizes.dim, requires_grad=True)
        if form == "loop over captions":
            pictures, captions = patches.view(batch, sizes.patches, sizes.dim), words.split(lengths)
            return saved_bytes(lambda: laps.loop_over(module, pictures, captions), known)
        sets = Fragments(words, offsets, check=False, max_length=max(lengths))
        images = Fragments.from_padded(patches.view(batch, sizes.patches, sizes.dim))
        return saved_bytes(lambda: module(images, sets), known)


def counted(
    model: Any, sizes: Sizes, batch: int, micro_batch: int, sparse_bytes: int | None, variant: str
) -> tuple[int, str]:
    """Return the memory of a step above weights and inputs, and how it was found.

    The graph is complete at the end of the forward pass. The backward pass reaches the pictures last: their graph is
    still there when all gradients of the text encoder are. In micro-batches the graph of the scores is gone before the
    encoders run again, pictures first; then there is the graph or the gradients of one micro-batch beside the sums of
    gradients.

    Args:
        sparse_bytes: measured peak of scores with gradient sparsity, their backward pass included.
    """
    form, parts = VARIANTS[variant]
    scores = (sparse_bytes or 0) if form == "itm_fast" else score_bytes(model, sizes, batch, form)
    how = "counted; scores measured" if form == "itm_fast" else "counted"
    pictures, captions = encoder_bytes(model, sizes, micro_batch if parts else batch)
    of_pictures, of_captions = _bytes_of(model.image_encoder), _bytes_of(model.text_encoder)
    if not parts:
        return max(pictures + captions + scores, pictures + of_captions), how
    embeddings = _BYTES * sizes.dim * (batch * sizes.patches + int(lengths_of(batch).sum()))
    again = of_pictures + max(pictures, of_pictures), of_pictures + of_captions + max(captions, of_captions)
    return embeddings + max(scores, *again), how


def run(
    small_batch: int,
    batches: Sequence[int],
    *,
    measured: Sequence[int],
    rounds: int,
    threads: int,
    micro_batches: tuple[int, int] = (2, 8),
    sizes: Sizes | None = None,
    before: Mapping[str, Any] | None = None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare all variants in a batch that fits, and count the memory of larger batches.

    Args:
        small_batch: pairs of the steps that all variants take.
        batches: larger numbers of pairs.
        measured: those in which the last variant takes a step.
        micro_batches: pairs that are encoded at a time, in the small batch and in the others.
        before: results of an interrupted call. What they contain is not measured again.
        save: called with the results after each part.
    """
    sizes = sizes or Sizes()
    torch.set_num_threads(threads)
    where = environment(threads, build_info())
    results = dict(before) if before else {"format_version": laps.FORMAT_VERSION, "environment": where, "commits": []}
    load, commit = os.getloadavg()[0], where["commit"]
    results["loads"] = [*results.get("loads", []), load]
    if commit not in results["commits"]:
        results["commits"].append(commit)
    model = make_model(sizes)
    results |= {"sizes": attrs.asdict(sizes), "weight_bytes": _bytes_of(model)}
    if "small" not in results:
        variants = _compare(model, sizes, small_batch, micro_batches[0], rounds, progress)
        results["small"] = {"batch": small_batch, "micro_batch": micro_batches[0], "rounds": rounds} | {
            "variants": variants
        }
        save(results)
    large = {case["batch"]: case for case in results.get("large", [])}
    for batch in batches:
        if batch not in large:
            progress(f"batches of {batch}: counts")
            found = _counts(model, sizes, batch, micro_batches[1], threads)
            large[batch] = {"batch": batch, "micro_batch": micro_batches[1], "variants": found}
            save(results | {"large": list(large.values())})
    results["large"] = list(large.values())
    _add_memory(model, sizes, results, threads, progress, save)
    for batch in measured:
        if "seconds" not in large[batch]["variants"][BOTH]:
            progress(f"batches of {batch}: {BOTH}")
            large[batch]["variants"][BOTH] |= _measured_step(model, make_inputs(sizes, batch), micro_batches[1])
            save(results)
    results["loads"].append(os.getloadavg()[0])
    return results


def _bytes_of(model: Any) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def _compare(
    model: Any, sizes: Sizes, batch: int, micro: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure time and agreement of all variants."""
    inputs = make_inputs(sizes, batch)
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    differences: dict[str, tuple[float, float]] = {LOOP: (0.0, 0.0)}
    exact: dict[str, Any] = {}

    def take(name: str) -> float:
        form, parts = VARIANTS[name]
        wall, start = time.monotonic(), time.process_time()
        scores = step_of(model, inputs, form, micro if parts else None)
        seconds = time.process_time() - start
        walls[name].append(time.monotonic() - wall)
        if name == LOOP:
            # All steps have the same weights.
            exact.update(scores=scores, gradients=[one.grad for one in model.parameters()])
        elif name not in differences:
            differences[name] = float((scores - exact["scores"]).abs().max()), _difference(model, exact["gradients"])
        return seconds

    timings = interleave(
        {name: partial(take, name) for name in VARIANTS},
        dict.fromkeys(VARIANTS, rounds),
        lambda call: call(),
        lambda name: progress(f"batches of {batch}: {name}"),
    )
    model.zero_grad(set_to_none=True)
    return {
        name: {
            **timing.as_dict(),
            "wall_s": walls[name][-rounds:],
            "largest_score_difference": differences[name][0],
            "gradient_difference": differences[name][1],
        }
        for name, timing in timings.items()
    }


def _add_memory(
    model: Any,
    sizes: Sizes,
    results: dict[str, Any],
    threads: int,
    progress: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Add measured and counted memory to the variants of the small batch."""
    small = results["small"]
    batch, micro = small["batch"], small["micro_batch"]
    sparse = None
    for name, (form, parts) in VARIANTS.items():
        found = small["variants"][name]
        if "counted_bytes" not in found:
            sparse = sparse or peak_memory(laps.make_step, "itm_fast", batch, threads=threads)
            found["counted_bytes"], found["how"] = counted(model, sizes, batch, micro, sparse, name)
        if "peak_bytes" not in found:
            progress(f"batches of {batch}: memory of {name}")
            found["peak_bytes"] = peak_memory(make_step, form, sizes, batch, micro if parts else None, threads=threads)
            save(results)


def _difference(model: Any, exact: Sequence[Tensor]) -> float:
    """Return the norm of the difference of all gradients from the exact ones, as a share of their norm."""
    pairs = [(one.grad, other) for one, other in zip(model.parameters(), exact, strict=True)]
    differing = sum(float((one - other).double().square().sum()) for one, other in pairs)
    return math.sqrt(differing / sum(float(one.double().square().sum()) for one in exact))


def _counts(model: Any, sizes: Sizes, batch: int, micro: int, threads: int) -> dict[str, Any]:
    """Count the memory of all variants."""
    sparse = peak_memory(laps.make_step, "itm_fast", batch, threads=threads)
    found = {}
    for name in VARIANTS:
        count, how = counted(model, sizes, batch, micro, sparse, name)
        found[name] = {"counted_bytes": count, "how": how}
    return found


def _measured_step(model: Any, inputs: tuple[Tensor, Tensor, Tensor], micro: int) -> dict[str, Any]:
    """Measure memory and time of one step of the last variant."""
    kept_bytes()  # Returns free memory, so that it does not hide the use of more.
    reset_peak()
    before, start = status_bytes("VmRSS"), time.monotonic()
    seconds = processor_time(lambda: step_of(model, inputs, VARIANTS[BOTH][0], micro))
    found = {"peak_bytes": status_bytes("VmHWM") - before, "seconds": seconds, "wall_s": time.monotonic() - start}
    model.zero_grad(set_to_none=True)
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """Render one table of the small batch and one of the larger ones."""
    small, where, sizes = results["small"], results["environment"], results["sizes"]
    loop = small["variants"][LOOP]
    rows = [
        ["variant", "step, CPU seconds", "of the loop", "wall time", "memory, measured", "memory, counted",
         "difference of scores", "of gradients"]
    ]  # fmt: skip
    for name, found in small["variants"].items():
        rows.append(
            [
                name,
                described_time(found),
                f"{found['median_s'] / loop['median_s']:.2f}",
                f"{sorted(found['wall_s'])[len(found['wall_s']) // 2]:.0f} s",
                megabytes(found),
                _counted(found),
                f"{found['largest_score_difference']:.1e}",
                f"{found['gradient_difference']:.1e}",
            ]
        )
    larger = [["batch", "variant", "memory", "how", "of the loop", "step, CPU seconds", "wall time"]]
    for case in results["large"]:
        base = case["variants"][LOOP]["counted_bytes"]
        for name, found in case["variants"].items():
            measured = "peak_bytes" in found
            size = found["peak_bytes"] if measured else found["counted_bytes"]
            larger.append(
                [
                    str(case["batch"]),
                    name,
                    f"{size / 1e6:,.0f} MB",
                    f"measured; {found['how']}: {_counted(found)}" if measured else found["how"],
                    f"{size / base:.2f}",
                    f"{found['seconds']:.0f} s, one step" if measured else "not run",
                    f"{found['wall_s']:.0f} s" if measured else "",
                ]
            )
    weights = results["weight_bytes"]
    return (
        f"Batches of {small['batch']}, micro-batches of {small['micro_batch']}: everything is measured, and memory is "
        f"counted, too.\n\n{table(rows)}\n\nLarger batches, micro-batches of {results['large'][0]['micro_batch']}:\n\n"
        f"{table(larger)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` at "
        f"{', '.join(str(commit)[:12] for commit in results['commits'])}: "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, float32, random weights. ViT: "
        f"{sizes['side']} pixels, patches of {sizes['patch']}, width {sizes['width']}, {sizes['layers']} layers; BERT "
        f"of the same width and depth, captions of {laps.WORDS.start} to {laps.WORDS.stop - 1} tokens; joint width "
        f"{sizes['dim']}. Times are processor time, medians of {small['rounds']} interleaved steps with smallest and "
        f"largest in brackets, without the optimiser; wall times show the other load of the machine "
        f"({min(results['loads']):.1f} to {max(results['loads']):.1f}). Memory is above the weights "
        f"({weights / 1e6:,.0f} MB; AdamW adds {2 * weights / 1e6:,.0f} MB) and the inputs. Counted memory is what "
        f"graph and gradients keep at the fullest moment, each storage once, without intermediate results.\n"
    )


def _counted(found: Mapping[str, Any]) -> str:
    return f"{found['counted_bytes'] / 1e6:,.0f} MB"
