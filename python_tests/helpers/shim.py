"""Kernels of csrc/include/itm_fast/cuda, compiled for the CPU and called with numpy arrays.

This module does not import torch, so that a process under AddressSanitizer starts quickly.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHIM = (ROOT / "csrc/shim/block.cpp", ROOT / "csrc/shim/shared_memory.cpp")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")

MINING = ("all", "hardest", "selective", "semi_hard", "sct")
SELECTIVE_DIVISORS = ("batch", "negatives")
DIRECTIONS = ("both", "rows", "columns")
REDUCTIONS = ("sum", "mean", "none")
STRATEGIES = ("relative", "absolute", "both")


# Seeds from here on let the blocks of a launch with a grid barrier run as far apart as they can.
IN_ORDER = 2**32


class KernelError(Exception):
    """An error that the shim reports about a kernel."""


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("c++") or "g++"


@functools.cache
def _folder() -> Path:
    """Return a folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="itm_fast_shim_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def compiled_shim(sanitized: bool = False) -> list[Path]:
    """Compile the shim once per process; return the object files."""
    flags = SANITIZERS if sanitized else ()
    return [_compiled_source(source, *flags) for source in SHIM]


@functools.cache
def _compiled_source(source: Path, *flags: str) -> Path:
    target = _folder() / "_".join([source.stem, *flags, ".o"])
    run_compiler("-c", "-O2", *flags, "-o", target, f"-I{ROOT / 'csrc'}", source)
    return target


def compile_driver(name: str, folder: Path, *flags: str, root: Path = ROOT) -> Path:
    """Compile the driver `name` with the kernels under `root` and link it with the shim; return the library."""
    library, drivers = folder / f"{name}.so", root / "python_tests/native/shim"
    includes = (f"-I{root / 'csrc'}", f"-I{root / 'csrc/include'}")
    sanitized = set(SANITIZERS) <= set(flags)
    shim = compiled_shim(sanitized)
    # Optimising code with sanitizers takes longer than running it.
    run_compiler(
        "-shared", *(("-O0",) if sanitized else ()), *flags, "-o", library, *includes, drivers / f"{name}.cpp", *shim
    )
    return library


@functools.cache
def compiled_driver(name: str, *flags: str) -> Path:
    """Compile a driver with the kernels as they are, once per process and choice of flags."""
    folder = _folder() / "_".join([name, *flags])
    folder.mkdir()
    return compile_driver(name, folder, *flags)


def run_compiler(*arguments: str | Path) -> None:
    """Run the compiler with the flags shared by all of these tests; fail on any warning."""
    command = [compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-fPIC", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def call(function: Any, *arguments: Any) -> None:
    """Call a function that returns an error string, passing arrays as pointers; raise `KernelError` on an error."""
    function.restype = ctypes.c_char_p
    problem = function(*[_argument(argument) for argument in arguments])
    if problem:
        raise KernelError(problem.decode())


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_int64(value) if isinstance(value, int) else value


class _Settings(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("large", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("margin", ctypes.c_double),
        ("epsilon", ctypes.c_double),
        ("mining", ctypes.c_int64),
        ("divisor", ctypes.c_int64),
        ("halve", ctypes.c_int64),
        ("directions", ctypes.c_int64),
        ("reduction", ctypes.c_int64),
        ("strategy", ctypes.c_int64),
        ("soft", ctypes.c_int64),
        ("alpha", ctypes.c_double),
        ("blocks", ctypes.c_int64),
    )


def loss_settings(shape: Sequence[int], large: bool, seed: int, options: dict[str, Any]) -> Any:
    return _Settings(
        seed,
        large,
        *shape,
        options.get("margin", 0.2),
        options.get("epsilon", 0.01),
        MINING.index(options.get("mining", "hardest")),
        SELECTIVE_DIVISORS.index(options.get("selective_divisor", "batch")),
        options.get("halve", False),
        DIRECTIONS.index(options.get("directions", "both")),
        REDUCTIONS.index(options.get("reduction", "sum")),
        STRATEGIES.index(options.get("strategy", "absolute")),
        options.get("soft", False),
        options.get("alpha", 0.5),
        options.get("blocks", 1),
    )


def _results(
    scores: np.ndarray, anchors: int, options: dict[str, Any], parts: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    n = 2 if options.get("directions", "both") == "both" else 1
    shape = ((2, anchors) if n == 2 else (anchors,)) if options.get("reduction") == "none" else ()
    kept = 0 if options.get("mining") == "all" else anchors
    return np.full(shape, 777, scores.dtype), np.full((*parts, n, kept), 777, np.int64)


def triplet_results(scores: np.ndarray, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Allocate the loss and the indices of the anchors' negatives."""
    return _results(scores, scores.shape[options.get("directions") == "columns"], options)


def boosting_results(scores: np.ndarray, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Allocate the loss and the indices of the anchors' negatives for each strategy."""
    return _results(scores, len(scores), options, (2 if options.get("strategy") == "both" else 1,))


def _triplet_gradients(scores: np.ndarray, positive_scores: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Allocate the gradients of `scores` and `positive_scores`."""
    return np.full(scores.shape, 777, scores.dtype), None if positive_scores is None else np.full_like(
        positive_scores, 777
    )


class _Driver:
    """A loaded driver library."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def run(self, name: str, like: np.ndarray, settings: Any, *arguments: Any) -> None:
        """Call a loss function in the dtype of `like`."""
        call(getattr(self.library, f"{name}_{like.dtype}"), ctypes.byref(settings), *arguments)


class TripletKernels(_Driver):
    """The kernels of triplet_loss and hardest_negatives, with the arguments of the operators."""

    def forward(
        self,
        scores: np.ndarray,
        positives: np.ndarray | None = None,
        positive_scores: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss and the index of each anchor's negative: (directions, anchors), or (directions, 0)."""
        settings = loss_settings(scores.shape, large, seed, options)
        loss, negatives = triplet_results(scores, options)
        arguments = (scores, positives, positive_scores, loss, loss.size, negatives, negatives.size)
        self.run("triplet_forward", scores, settings, *arguments)
        return loss, negatives

    def backward(
        self,
        grad_loss: np.ndarray,
        scores: np.ndarray,
        negatives: np.ndarray,
        positives: np.ndarray | None = None,
        positive_scores: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the gradients of the scores and of `positive_scores`."""
        settings = loss_settings(scores.shape, large, seed, options)
        grad_scores, grad_positive = _triplet_gradients(scores, positive_scores)
        arguments = (grad_loss, grad_loss.size, scores, positives, positive_scores, negatives, negatives.size)
        self.run("triplet_backward", scores, settings, *arguments, grad_scores, grad_positive)
        return grad_scores, grad_positive

    def hardest_negatives(
        self, scores: np.ndarray, positives: np.ndarray | None = None, *, large: bool = False, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and indices, (2, B) each: first of the rows, then of the columns."""
        settings = loss_settings(scores.shape, large, seed, {})
        values = np.full((2, len(scores)), 777, scores.dtype)
        indices = np.full((2, len(scores)), 777, np.int64)
        self.run("hardest_negatives", scores, settings, scores, positives, values, indices)
        return values, indices

    def hardest_negatives_backward(
        self, grad: np.ndarray, indices: np.ndarray, *, large: bool = False, seed: int = 0
    ) -> np.ndarray:
        """Return the gradient (B, B) of the scores for the gradient (2, B) of the values."""
        size = grad.shape[1]
        settings = loss_settings((size, size), large, seed, {})
        grad_scores = np.full((size, size), 777, grad.dtype)
        self.run("hardest_negatives_backward", grad, settings, grad[0], grad[1], indices[0], indices[1], grad_scores)
        return grad_scores


class BoostingKernels(_Driver):
    """The kernels of boosting_loss, with the arguments of the operators."""

    def forward(
        self,
        scores: np.ndarray,
        anchor_scores: np.ndarray,
        positives: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss and the index of each anchor's negative: (strategies, directions, anchors or 0)."""
        settings = loss_settings(scores.shape, large, seed, options)
        loss, negatives = boosting_results(scores, options)
        arguments = (scores, anchor_scores, positives, loss, loss.size, negatives, negatives.size)
        self.run("boosting_forward", scores, settings, *arguments)
        return loss, negatives

    def backward(
        self,
        grad_loss: np.ndarray,
        scores: np.ndarray,
        anchor_scores: np.ndarray,
        negatives: np.ndarray,
        positives: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> np.ndarray:
        """Return the gradient of the scores."""
        settings = loss_settings(scores.shape, large, seed, options)
        grad_scores = np.full(scores.shape, 777, scores.dtype)
        arguments = (grad_loss, grad_loss.size, scores, anchor_scores, positives, negatives, negatives.size)
        self.run("boosting_backward", scores, settings, *arguments, grad_scores)
        return grad_scores


class OneLaunchKernels(_Driver):
    """The kernels that compute a loss and its gradient in one launch, with `blocks` blocks resident at once."""

    def triplet(
        self,
        scores: np.ndarray,
        positives: np.ndarray | None = None,
        positive_scores: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> list[np.ndarray]:
        """Return the loss, the negatives, the gradient of the scores, and that of `positive_scores` if given."""
        settings = loss_settings(scores.shape, large, seed, options)
        loss, negatives = triplet_results(scores, options)
        grad_scores, grad_positive = _triplet_gradients(scores, positive_scores)
        arguments = (scores, positives, positive_scores, loss, negatives, negatives.size, grad_scores, grad_positive)
        self.run("triplet_with_gradient", scores, settings, *arguments)
        return [part for part in (loss, negatives, grad_scores, grad_positive) if part is not None]

    def boosting(
        self,
        scores: np.ndarray,
        anchor_scores: np.ndarray,
        positives: np.ndarray | None = None,
        *,
        large: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> list[np.ndarray]:
        """Return the loss, the negatives and the gradient of the scores."""
        settings = loss_settings(scores.shape, large, seed, options)
        loss, negatives = boosting_results(scores, options)
        grad_scores = np.full(scores.shape, 777, scores.dtype)
        arguments = (scores, anchor_scores, positives, loss, negatives, negatives.size, grad_scores)
        self.run("boosting_with_gradient", scores, settings, *arguments)
        return [loss, negatives, grad_scores]

    def scale(self, gradient: np.ndarray, factor: float, *, seed: int = 0, blocks: int = 3) -> np.ndarray:
        """Return a gradient scaled by `scale_gradient`."""
        scaled = gradient.copy()
        settings = loss_settings((gradient.size, 1), False, seed, {"blocks": blocks})
        self.run("scale_gradient", gradient, settings, scaled, np.array(factor, gradient.dtype))
        return scaled


class RetrievalKernels(_Driver):
    """The kernels of retrieval_ranks."""

    def ranks(
        self, scores: np.ndarray, caption_image: np.ndarray, ties: str, *, large: bool = False, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks of the images and of the captions."""
        image_ranks = np.full(scores.shape[0], 777, np.int64)
        caption_ranks = np.full(scores.shape[1], 777, np.int64)
        function = getattr(self.library, f"retrieval_ranks_{scores.dtype}")
        arguments = (seed, int(large), *scores.shape, scores, caption_image, int(ties == "pessimistic"))
        call(function, *arguments, image_ranks, caption_ranks)
        return image_ranks, caption_ranks


class ProductKernels(_Driver):
    """A product of 16-bit matrices that uses every wrapper of tensor cores and asynchronous copies."""

    def product(
        self, left: np.ndarray, right: np.ndarray, *, transposed: bool = False, half: bool = False, seed: int = 0
    ) -> np.ndarray:
        """Return `left @ right.T`, or `left @ right` if `transposed`. Both hold the bits of bf16, or fp16 if `half`."""
        rows, depth = left.shape
        columns = right.shape[1 if transposed else 0]
        out = np.full((rows, columns), 777, np.float32)
        arguments = (seed, int(transposed), int(half), rows, columns, depth, left, right, out)
        call(self.library.product, *arguments)
        return out
