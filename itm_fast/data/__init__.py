"""Data: the published precomputed layout, feature stores, vocabularies, batches, and the bundled emoji pictures.

`dataset` gives batches of images and captions, `precomputed` the same from a split on disk, whose files `layout` reads,
and `store` from a feature store, which `pack` makes; `features` says where features come from;
`vocabulary` and `tokenization` turn captions into token ids, `bert_vocabulary` into those of BERT; `loading` says which
captions form a batch; `augmentation` changes captions and images in training; `check` lists what is wrong with a
folder; `emoji` is a real data set that comes with the package.
"""

from .augmentation import BatchAugmentation, RegionAugmentation, TextAugmentation
from .bert_vocabulary import BertVocabulary
from .dataset import Batch, CaptionDataset
from .loading import BatchLoader, EpochSampler
from .pack import pack
from .precomputed import PrecomputedDataset
from .store import StoreDataset, check_data, open_split
from .tokenization import tokenize
from .vocabulary import Vocabulary, find_vocabulary, load_vocabulary

__all__ = [
    "Batch",
    "BatchAugmentation",
    "BatchLoader",
    "BertVocabulary",
    "CaptionDataset",
    "EpochSampler",
    "PrecomputedDataset",
    "RegionAugmentation",
    "StoreDataset",
    "TextAugmentation",
    "Vocabulary",
    "check_data",
    "find_vocabulary",
    "load_vocabulary",
    "open_split",
    "pack",
    "tokenize",
]
