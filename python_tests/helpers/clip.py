"""A small CLIP and a small SigLIP with random weights: their model folders as transformers writes them.

Inside: `write_clip`, `WORDS`, `LONGEST`, `WIDTH`.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from python_tests.helpers.pictures import ENCODERS, SIDE

# Words that are one token; others are spelt.
WORDS = ("map", "sun", "flower", "red", "skin", "tone", "with", "of", "flag", "man", "woman", "picture", "small",
         "dark", "light", "medium", "emoji", "face", "hand", "person", "couple", "and", "button", "heart",
         "hair")  # fmt: skip
WIDTH, LONGEST = 16, 40
_TOWER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "attention_dropout": 0.0}


def _byte_pairs(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer as those of CLIP: byte pairs of lower-case words, between two special tokens."""
    start, end, suffix = "<|startoftext|>", "<|endoftext|>", "</w>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = [*alphabet, *(letter + suffix for letter in alphabet)], []
    for word in words:
        parts = [*word[:-1], word[-1] + suffix]
        for length in range(1, len(parts)):
            merges.append(("".join(parts[:length]), parts[length]))
            tokens.append("".join(merges[-1]))
    tokens = [*dict.fromkeys(tokens), start, end]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, list(dict.fromkeys(merges)), end_of_word_suffix=suffix, unk_token=end))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = Regex(r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (end, ids[end]), (start, ids[start]), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer


def _sentence_pieces(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer as that of SigLIP: pieces of lower-case text without punctuation, and a token at the end."""
    letters = [*string.ascii_lowercase, *string.digits, "▁"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), *((letter, -9.0) for letter in letters)]
    pieces += [("▁" + word, -4.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, 2))
    punctuation = Regex("[" + "".join("\\" + mark for mark in string.punctuation) + "]")
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(punctuation, ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def write_clip(folder: Path, kind: str = "clip", words: Sequence[str] = WORDS, **text: Any) -> torch.nn.Module:
    """Write a model, its image processor and its tokenizer; return the model in evaluation mode.

    The weights are far from the usual initialisation. `text` changes the settings of the text tower.
    """
    import transformers

    tokenizer = (_byte_pairs if kind == "clip" else _sentence_pieces)(words)
    pad, end = ("<|endoftext|>", "<|endoftext|>") if kind == "clip" else ("</s>", "</s>")
    size = tokenizer.get_vocab_size()
    ids = {"vocab_size": size, "eos_token_id": tokenizer.token_to_id(end), "bos_token_id": size - 2, "pad_token_id": 1}
    text = {**_TOWER, **ids, "hidden_size": 20, "max_position_embeddings": LONGEST, **text}
    vision = {**_TOWER, "hidden_size": 12 if kind == "clip" else WIDTH, "image_size": SIDE, "patch_size": 8}
    if kind == "clip":
        config: Any = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
        model: Any = transformers.CLIPModel(config)
    else:
        config = transformers.SiglipConfig(text_config={**text, "projection_size": WIDTH}, vision_config=vision)
        model = transformers.SiglipModel(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.25 * torch.randn(weight.shape, generator=random) + ("norm.weight" in name))
        model.logit_scale.fill_(3.0)
        if kind == "siglip":
            model.logit_bias.fill_(-7.0)
    model.eval().save_pretrained(folder)
    ENCODERS[kind][1]().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, model_max_length=LONGEST
    ).save_pretrained(folder)
    return model
