"""The encoders of a model as ONNX graphs, with the scores of itm_fast: NumPy arrays in and out.

Inside: `export_onnx`, `OnnxModel`.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from itm_fast.adapters.dense_encoders import dense_captions, dense_images
from itm_fast.fragments import Fragments
from itm_fast.models import MatchingModel, load

__all__ = ["OnnxModel", "export_onnx"]

IMAGES_FILE, CAPTIONS_FILE = "image_encoder.onnx", "text_encoder.onnx"
OPSET = 18
Floats = npt.NDArray[np.float32]


def export_onnx(
    model: MatchingModel, directory: str | os.PathLike[str], *, regions: int | None = None, tolerance: float = 1e-4
) -> None:
    """Write the encoders of a model as ONNX, beside the files of `model.save`, for `OnnxModel`.

    ONNX Runtime then encodes random inputs of other sizes than those of the export, and the embeddings are compared
    with those of the model.

    Args:
        model: in evaluation mode, with float32 weights on the CPU.
        directory: the folder; it is created if it is missing.
        regions: number of regions, or stored patches, of an image. By default any number; a vision model on patches
            needs it.
        tolerance: largest difference of the embeddings.

    Raises:
        ValueError: the model is in training mode, an encoder cannot be exported, the embeddings differ, or a package of
            the extra `onnx` is not installed. Nothing is written.
    """
    if model.training:
        raise ValueError("model: expected evaluation mode, as dropout has no place in a graph; call model.eval()")
    runtime = _onnxruntime()
    images, captions = dense_images(model), dense_captions(model)
    config = model.encoder_config
    longest = min(model.max_caption_length or 12, 12)
    random = torch.Generator().manual_seed(0)

    def features(n: int, k: int) -> Tensor:
        return torch.rand(n, regions or k, config.feature_dim, generator=random) * 2 - 1

    def words(lengths: list[int]) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, config.vocab_size, (len(lengths), max(lengths)), generator=random)
        return ids, torch.tensor(lengths)

    free = {"features": {0: "n", **({} if regions else {1: "k"})}}
    of_images = _graph(images, (features(2, 4),), ["features"], "images", free)
    axes = {"token_ids": {0: "n", 1: "L"}, "lengths": {0: "n"}}
    of_captions = _graph(captions, words([longest, longest - 1]), ["token_ids", "lengths"], "captions", axes)
    with torch.no_grad():
        for graph, module, inputs in (
            (of_images, model.encode_images, (features(3, 7),)),
            (of_captions, model.encode_captions, words([3, longest // 2, 1])),
        ):
            try:
                found = _run(_session(runtime, graph), *(one.numpy() for one in inputs))
            except Exception as error:  # The package has an exception for each status.
                raise ValueError(
                    f"model: an encoder of {model.name} cannot be exported to ONNX: {_first(error)}"
                ) from None
            _check(found, module(*inputs), tolerance, model.name)
    # Graphs of another model would load, and encode for this one.
    model.save(directory, beside={IMAGES_FILE: of_images, CAPTIONS_FILE: of_captions})


class OnnxModel:
    """Encode images and captions by ONNX Runtime, and score them by itm_fast.

    Args:
        directory: what `export_onnx` wrote.
        providers: execution providers of ONNX Runtime for the encoders.

    Raises:
        ValueError: a file is missing or damaged, or a package of the extra `onnx` is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        self.model = load(directory)
        runtime = _onnxruntime()
        paths = [Path(directory) / name for name in (IMAGES_FILE, CAPTIONS_FILE)]
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file; itm_fast.adapters.onnx.export_onnx writes it")
        self._images, self._captions = (_session(runtime, path.read_bytes(), providers, path) for path in paths)

    def encode_images(self, features: npt.ArrayLike) -> Floats:
        """Encode features (n, k, f) as float32 (n, t, d), or (n, d) with a global model."""
        return _run(self._images, np.asarray(features, dtype=np.float32))

    def encode_captions(
        self, captions: Any, lengths: npt.ArrayLike | None = None
    ) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Encode captions.

        Args:
            captions: n strings, or token ids (n, L), padded anyhow.
            lengths: (n,), at least 1; left out for strings.

        Returns:
            Embeddings, float32 (n, L, d), zero behind each caption, or (n, d) with a global model; and the lengths.

        Raises:
            ValueError: a caption has no tokens, or more than the model reads.
        """
        if lengths is None:
            ids, counts = (one.numpy() for one in self.model.tokenize(captions))
        else:
            ids, counts = np.asarray(captions, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        most = self.model.max_caption_length or ids.shape[1]
        shortest, longest, most = counts.min(initial=most), counts.max(initial=1), min(most, ids.shape[1])
        if not 1 <= shortest <= longest <= most:
            raise ValueError(f"lengths: expected 1 to {most} tokens, got {shortest} to {longest}")
        return _run(self._captions, ids[:, :longest], counts), counts

    def score(
        self, images: npt.ArrayLike, captions: npt.ArrayLike, lengths: npt.NDArray[np.int64] | None = None
    ) -> Floats:
        """Score what the encoders returned by the model: float32 (n_images, n_captions).

        Args:
            images: what `encode_images` returned.
            captions: the embeddings that `encode_captions` returned.
            lengths: the lengths that it returned; not needed by a global model.
        """
        with torch.inference_mode():
            scores = self.model.score(_sets(images), _sets(captions, lengths))
        found: Floats = scores.numpy()
        return found


def _graph(
    module: nn.Module, inputs: tuple[Tensor, ...], names: list[str], output: str, axes: dict[str, dict[int, str]]
) -> bytes:
    file: Any = io.BytesIO()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Of the tracer, about sizes that it keeps; the embeddings of other sizes are checked.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(), inputs, file, dynamo=False, opset_version=OPSET,
                input_names=names, output_names=[output], dynamic_axes=axes,
            )  # fmt: skip
    except ImportError:
        raise ValueError(_MISSING) from None
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(f"model: the encoder of {output} cannot be exported to ONNX: {_first(error)}") from None
    return file.getvalue()


_MISSING = "onnx: the packages onnx and onnxruntime are needed; install them with pip install 'itm_fast[onnx]'"


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ValueError(_MISSING) from None
    return onnxruntime


def _session(runtime: Any, graph: bytes, providers: Sequence[str] = ("CPUExecutionProvider",), path: Any = "") -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    try:
        return runtime.InferenceSession(graph, options, providers=list(providers))
    except Exception as error:  # The package has an exception for each status.
        raise ValueError(f"{path or 'model'}: not a graph that ONNX Runtime reads: {_first(error)}") from None


def _run(session: Any, *inputs: npt.NDArray[Any]) -> Floats:
    names = [one.name for one in session.get_inputs()]
    found: Floats = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    return found


def _check(found: Floats, wanted: Any, tolerance: float, name: str) -> None:
    values = wanted.to_padded()[0] if isinstance(wanted, Fragments) else wanted
    differs = found.shape != tuple(values.shape)
    largest = np.inf if differs else float(np.abs(found - values.numpy()).max(initial=0.0))
    if not largest <= tolerance:
        raise ValueError(
            f"model: the graph of {name} gives other embeddings (difference {largest:.2g}); do not use ONNX"
        )


def _sets(embeddings: npt.ArrayLike, lengths: Any = None) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(embeddings, dtype=np.float32))
    if tensor.ndim == 2:
        return tensor
    return Fragments.from_padded(tensor, None if lengths is None else torch.as_tensor(lengths))
