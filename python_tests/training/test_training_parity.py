"""Training equals plain PyTorch step by step, and as a whole if training does not magnify rounding.

SCAN's published normalisation divides the raw scores of a region by their norm over the words of a caption. Untrained
words are nearly parallel, and a region orthogonal to them has a norm of a few thousandths. The curvature of the
quotient, one over the squared norm, then magnifies a difference of weights by up to fifty times per step. Two runs of
plain PyTorch whose weights differ by 1e-15 diverge in the same steps and as far as from the kernels, by up to 4 % of
the loss within a hundred steps. So the published setting is compared at equal weights, and whole runs use the
normalisation "softmax", which has no such quotient.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.data import Batch
from itm_fast.training import Trainer
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.runs import OPTIONS, config, make_trainer

STEPS = 100


@contextmanager
def plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Use the reference instead of the kernels inside this block; count its calls."""
    calls: Counter[str] = Counter()

    def counting(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object, **options: object) -> torch.Tensor:
            calls[operator.__name__] += 1
            return operator(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(F_itm, "cross_attention_scores", counting(reference.cross_attention_scores))
        patch.setattr(F_itm, "matching_loss", counting(reference.matching_loss))
        yield calls


def trainer_in(dtype: torch.dtype, data: Path, out: Path, **changes: object) -> tuple[Trainer, Iterator[Batch]]:
    """Return a trainer whose weights are `dtype`, and the batches of its first steps."""
    trainer = make_trainer(config(data, out, **changes))
    trainer.model.to(dtype)
    batches = (attrs.evolve(batch, features=batch.features.to(dtype)) for batch in trainer._batches(0))
    return trainer, itertools.islice(batches, STEPS)


def gradient(trainer: Trainer) -> torch.Tensor:
    """Return the gradient of the last step, all weights in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_has_the_loss_and_gradient_of_plain_pytorch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Published setting in float64: at all weights of a run on the kernels, both give the same loss and gradient.

    How far rounding may move the gradient depends on the weights, and is measured: plain PyTorch with each weight moved
    by its last digit. A sum of d products, in any order, equals that of factors moved by at most d last digits, so d
    times as much is allowed.
    """
    dtype, width = torch.float64, OPTIONS["embed_dim"]
    eps = torch.finfo(dtype).eps
    # Without clipping, the remaining gradient of a step is that of the loss.
    native, batches = trainer_in(dtype, data, tmp_path / "native", seed=seed, grad_clip=0.0)
    plain, _ = trainer_in(dtype, data, tmp_path / "plain", seed=seed, grad_clip=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for batch in batches:
        weights = {name: values.clone() for name, values in native.model.state_dict().items()}
        signs = {name: torch.randint(2, w.shape, generator=generator) * 2 - 1 for name, w in weights.items()}
        moved = {name: values + eps * signs[name] * values for name, values in weights.items()}
        with plain_pytorch(monkeypatch) as calls:
            plain.model.load_state_dict(moved)
            plain._step(batch)
            beside = gradient(plain)
            plain.model.load_state_dict(weights)
            expected = plain._step(batch)
        assert calls == {"matching_loss": 2}
        actual = native._step(batch)
        # The loss is a sum of a hinge per caption and direction, each of a sum of d products.
        rounding = 2 * len(batch) * width * eps
        assert actual["loss"] == pytest.approx(expected["loss"], rel=rounding)
        allowed = width * float((beside - gradient(plain)).norm())
        assert 0 < allowed < 1e-10 * expected["grad_norm"]
        assert float((gradient(native) - gradient(plain)).norm()) <= allowed
        losses.append(actual["loss"])
    assert losses[-1] < 0.65 * losses[0]
    with native_calls() as operators:
        native._step(batch)
    assert [name for name, _ in operators] == ["matching_loss", "scale_gradient", "cross_attention_scores_backward"]


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_goes_the_same_way_as_on_plain_pytorch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int
) -> None:
    """A hundred steps of each with clipping and the normalisation "softmax": losses, norms, scores and recalls agree.

    Each step may add a rounding error, and none is magnified.
    """
    tolerance = STEPS * torch.finfo(dtype).eps
    options = {**OPTIONS, "normalization": "softmax"}

    def trained(name: str) -> tuple[dict[str, list[float]], torch.Tensor, dict[str, float]]:
        trainer, batches = trainer_in(dtype, data, tmp_path / name, seed=seed, model_options=options)
        outputs = [trainer._step(batch) for batch in batches]
        validation = trainer.validation_data
        with native_calls() as native, torch.no_grad():
            images = trainer.model.eval().encode_images(validation.image_batch(range(10)).to(dtype))
            scores = trainer.model.score(images, trainer.model.encode_captions(*validation.caption_batch(range(50))))
        assert [operator for operator, _ in native] == (["cross_attention_scores"] if name == "native" else [])
        recalls = F_itm.recall_summary(*F_itm.retrieval_ranks(scores, validation.caption_image))
        return {key: [output[key] for output in outputs] for key in ("loss", "grad_norm")}, scores, recalls

    with plain_pytorch(monkeypatch) as calls:
        curves, scores, recalls = trained("plain")
    assert calls == {"cross_attention_scores": 1, "matching_loss": STEPS}
    native_curves, native_scores, native_recalls = trained("native")
    # Clipping and Adam hide the size of the gradient; its norm reveals it.
    for key, values in curves.items():
        assert native_curves[key] == pytest.approx(values, rel=tolerance), key
    assert float((native_scores - scores).abs().max()) < tolerance
    assert native_recalls == recalls
    assert curves["loss"][-1] < 0.65 * curves["loss"][0]
    assert recalls["rsum"] > 380
