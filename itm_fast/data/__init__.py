"""Data: the published precomputed layout, vocabularies, batches, and the bundled emoji pictures.

`dataset` gives batches of images and captions, `precomputed` the same from a split on disk, whose files `layout` reads;
`vocabulary` and `tokenization` turn captions into token ids; `loading` says which captions form a batch;
`augmentation` changes captions in training; `check` lists what is wrong with a folder; `emoji` is a real data set that
comes with the package.
"""

from .augmentation import TextAugmentation
from .dataset import Batch, CaptionDataset
from .loading import BatchLoader, EpochSampler
from .precomputed import PrecomputedDataset
from .tokenization import tokenize
from .vocabulary import Vocabulary, find_vocabulary, load_vocabulary

__all__ = [
    "Batch",
    "BatchLoader",
    "CaptionDataset",
    "EpochSampler",
    "PrecomputedDataset",
    "TextAugmentation",
    "Vocabulary",
    "find_vocabulary",
    "load_vocabulary",
    "tokenize",
]
