"""Data: the published precomputed layout, feature stores, vocabularies, batches, and the bundled emoji pictures.

`dataset` makes batches of images and captions from arrays, `precomputed` from a data folder, and `store` from a feature
store. `layout` reads the files of a data folder, `pack` writes feature stores, and `features` defines the sources of
features. `import_pictures` turns picture files into stores. `vocabulary`, `tokenization`, `bert_vocabulary` and
`tokenizer_vocabulary` turn captions into token ids. `loading` chooses the captions of each batch. `augmentation`
changes captions and images in training. `check` lists the problems of a folder. `emoji` is a real data set that comes
with the package.
"""

from itm_fast.data.augmentation import BatchAugmentation, RegionAugmentation, TextAugmentation
from itm_fast.data.bert_vocabulary import BertVocabulary
from itm_fast.data.dataset import Batch, CaptionDataset
from itm_fast.data.loading import BatchLoader, EpochSampler
from itm_fast.data.pack import pack
from itm_fast.data.picture_lookup import picture_of, whole_picture_of
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.speech_tags import nltk_speech_tags, read_speech_tags
from itm_fast.data.store import StoreDataset, check_data, open_split
from itm_fast.data.tagged_images import TaggedImages
from itm_fast.data.tokenization import tokenize
from itm_fast.data.tokenizer_vocabulary import TokenizerVocabulary
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
    "TaggedImages",
    "TextAugmentation",
    "TokenizerVocabulary",
    "Vocabulary",
    "check_data",
    "find_vocabulary",
    "load_vocabulary",
    "nltk_speech_tags",
    "open_split",
    "pack",
    "picture_of",
    "read_speech_tags",
    "tokenize",
    "whole_picture_of",
]
