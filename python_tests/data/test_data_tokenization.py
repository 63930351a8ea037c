"""Tokens of captions compared with NLTK's tokenizer, and the sentence rule."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

from itm_fast.data.layout import MAX_CAPTION_LENGTH
from itm_fast.data.tokenization import ABBREVIATIONS, split_sentences, tokenize

NLTK = NLTKWordTokenizer()


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("A man on a hill.", "a man on a hill ."),
        ("A man on a hill .", "a man on a hill ."),
        ("Two dogs", "two dogs"),
        ("A man in a hat. He smiles.", "a man in a hat . he smiles ."),
        ('He says "stop." She runs.', "he says `` stop . '' she runs ."),
        ("(a dog.) It barks!", "( a dog . ) it barks !"),
        ("Is it? Yes! It's a cat.", "is it ? yes ! it 's a cat ."),
        ("Mr. Smith isn't at St. Paul.", "mr. smith is n't at st. paul ."),
        ("At 5 p.m. a train leaves.", "at 5 p.m. a train leaves ."),
        ("J. Doe wears no. 5. he runs", "j. doe wears no . 5. he runs"),
        ("Wait... there is more.", "wait ... there is more ."),
        ("You cannot, I'm gonna.", "you can not , i 'm gon na ."),
        ("A t-shirt for $5, 10% off; ok?", "a t-shirt for $ 5 , 10 % off ; ok ?"),
        ("a street sign\u2028with text", "a street sign with text"),
    ],
)
def test_tokens_of_captions(caption, tokens):
    assert tokenize(caption) == tokens.split()


def test_tokens_without_the_sentence_rule_match_nltk():
    assert tokenize("A hat. He smiles.", sentences=False) == ["a", "hat.", "he", "smiles", "."]


WORDS = st.one_of(
    st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=6),
    st.sampled_from(
        ["cannot", "gonna", "more", "'n", "d'ye", "'tis", "wanna", "gimme", "lemme", "gotta", "don't", "..."]
    ),
    st.text(".,!?;:'\"()[]&%$#@-`*<>", min_size=1, max_size=3),
    st.sampled_from(["dog.", "(a)", '"no"', "it's", "they're", "5.", "u.s.", "x-ray", "1,000", "a--b"]),
)


@given(st.lists(WORDS, min_size=1, max_size=8), st.sampled_from([" ", "  "]), st.sampled_from(["", ".", " .", ". "]))
def test_tokens_match_nltk(words, blank, end):
    caption = blank.join(words) + end
    assert tokenize(caption, sentences=False) == NLTK.tokenize(caption.lower())


PLAIN_PIECES = st.one_of(
    st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=8),
    st.sampled_from([" ", " ", "-", ",", ", ", " , ", "cannot", "gonna", "wanna", "more", "d", "tis"]),
)


@given(st.lists(PLAIN_PIECES, max_size=10), st.sampled_from(["", ".", " .", ". "]))
def test_the_fast_path_for_plain_captions_matches_nltk(pieces, end):
    caption = "".join(pieces) + end
    assert tokenize(caption, sentences=False) == NLTK.tokenize(caption)


@given(st.text("ab5 .?!\"')", max_size=30))
def test_sentence_splitting_keeps_all_text(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


@pytest.mark.parametrize("word", sorted(ABBREVIATIONS))
def test_no_abbreviation_ends_a_sentence(word):
    assert split_sentences(f"near {word}. there is a dog. it runs") == [f"near {word}. there is a dog.", "it runs"]


@pytest.mark.parametrize("end", ["", " b"])
def test_sentences_of_a_long_word_take_linear_time(end):
    """A quadratic rule would take hours for two million characters without a blank."""
    assert split_sentences("a." * 1_000_000 + end) == ["a." * 1_000_000, *end.split()]


@pytest.mark.parametrize("unit", ["a", ".", "(", "$", "a,", "1,1", "'", "“", "é"])
def test_tokens_of_a_long_word_take_linear_time(unit):
    """A quadratic rule takes a minute or more for a caption of the largest length."""
    start = time.process_time()
    assert tokenize((unit * MAX_CAPTION_LENGTH)[: MAX_CAPTION_LENGTH - 1] + "!")[-1] == "!"
    assert time.process_time() - start < 15


SENTENCE_PARTS = ("a", "dog", "hat.", "really?", "no!", "wait...", ".", "?", "x-ray.", "it's.", "5.", "-5.", "j.")
LOWER_CASE_TEXT = st.lists(
    st.sampled_from([*SENTENCE_PARTS, *(f"{word}." for word in sorted(ABBREVIATIONS))]), min_size=1, max_size=6
).map(" ".join)


@given(LOWER_CASE_TEXT)
def test_tokens_match_punkt_with_the_same_abbreviations(text):
    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    sentences = PunktSentenceTokenizer(parameters).tokenize(text)
    assert tokenize(text) == [word for sentence in sentences for word in NLTK.tokenize(sentence)]
