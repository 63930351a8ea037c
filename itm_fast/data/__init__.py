"""Data: the published precomputed layout, feature stores, vocabularies, batches, and the bundled emoji pictures.

`dataset` gives batches of images and captions, `precomputed` the same from a split on disk, whose files `layout` reads,
and `store` from a feature store, which `pack` makes; `features` says where features come from;
`vocabulary` and `tokenization` turn captions into token ids, `bert_vocabulary` into those of BERT; `loading` says which
captions form a batch; `augmentation` changes captions and images in training; `check` lists what is wrong with a
folder; `emoji` is a real data set that comes with the package.
"""

from itm_fast.data.augmentation import BatchAugmentation, RegionAugmentation, TextAugmentation
from itm_fast.data.bert_vocabulary import BertVocabulary
from itm_fast.data.dataset import Batch, CaptionDataset
from itm_fast.data.loading import BatchLoader, EpochSampler
from itm_fast.data.pack import pack
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.store import StoreDataset, check_data, open_split
from itm_fast.data.tokenization import tokenize
from itm_fast.data.vocabulary import Vocabulary, find_vocabulary, load_vocabulary

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
