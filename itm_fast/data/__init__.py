"""Data: the published precomputed layout, vocabularies, batches, and the bundled emoji pictures.

`precomputed` reads a split, `layout` its files; `vocabulary` and `tokenization` turn captions into token ids; `loading`
forms batches; `emoji` is a real data set that comes with the package.
"""

from .loading import BatchLoader, EpochSampler
from .precomputed import Batch, PrecomputedDataset
from .tokenization import tokenize
from .vocabulary import Vocabulary, find_vocabulary, load_vocabulary

__all__ = [
    "Batch",
    "BatchLoader",
    "EpochSampler",
    "PrecomputedDataset",
    "Vocabulary",
    "find_vocabulary",
    "load_vocabulary",
    "tokenize",
]
