"""Segments are whole, in order, short enough, and give the document back."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from postil.documents import Document
from postil.margins.events import Segment
from postil.margins.segments import default_segment_tokens, split

SENTENCES = [
    "The ferry leaves the harbour at dawn.",
    "Nobody had told the captain about the fog!",
    "Was it the second bell or the third?",
    "Crates of oranges stood along the quay, sweet and heavy.",
]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Every byte has a token, and a token for the start of text stands before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@cache
def words() -> PreTrainedTokenizerFast:
    """A token a word, none for blanks: counting is easy to follow by hand."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def tokens_of(text: str, tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check(
    documents: list[Document],
    segments: list[Segment],
    tokenizer: PreTrainedTokenizerFast,
    most: int,
) -> None:
    assert [segment.index for segment in segments] == list(range(len(segments)))
    rest = iter(segments)
    for document in documents:
        at = 0
        while at < len(document.text):
            segment = next(rest)
            assert (segment.source, segment.start) == (document.source, at)
            assert segment.text == document.text[segment.start : segment.end] != ""
            assert segment.page == document.page_at(at)
            assert tokens_of(segment.text, tokenizer) <= most or len(segment.text) == 1
            at = segment.end
    assert next(rest, None) is None


blank_or_word = st.sampled_from(
    [" ", "\n", "\n\n", "\n\n\n", "\t", "word", "One. Two? ", "é", "👩🏽‍🚀"]
)
texts = st.one_of(st.text(), st.lists(blank_or_word | st.text(max_size=5)).map("".join))


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=3), st.integers(1, 60), st.booleans())
@example(["word" + "\n" * 300 + "word"], 5, True)
@example([" " * 99], 3, True)
@example(["a\n\n\n\nb\n\nc\n\n\n\n" * 9], 4, False)
@example(["word " * 200], 1, False)  # more than one stretch
@example(["é👩🏽‍🚀\n" * 60, "x" * 300], 1, True)
def test_segments_joined_give_the_documents_back(
    contents: list[str], segment_tokens: int, bytewise: bool
) -> None:
    tokenizer = byte_level() if bytewise else words()
    documents = [Document(f"d{number}", text) for number, text in enumerate(contents)]
    segments = split(documents, tokenizer, segment_tokens)
    check(documents, segments, tokenizer, segment_tokens)


def prose(sentences: int, seed: int = 0) -> str:
    chance = random.Random(seed)
    gaps = [" ", " ", " ", "\n\n", "\n\n\n\n"]
    return "".join(chance.choice(SENTENCES) + chance.choice(gaps) for _ in range(sentences))


def test_cuts_stand_at_the_ends_of_sentences() -> None:
    document = Document("tale", prose(400))
    segments = split([document], byte_level(), 200)
    check([document], segments, byte_level(), 200)
    assert len(segments) > 10
    for segment in segments:
        assert segment.text.strip()[-1] in ".!?"
        assert not segment.text[0].isspace()


def test_cuts_prefer_the_ends_of_paragraphs() -> None:
    paragraphs = [
        "one two three. four five six.\n\n",
        "seven eight. nine ten.\n\n",
        "eleven twelve. thirteen.",
    ]
    segments = split([Document("p", "".join(paragraphs))], words(), 6)
    assert [segment.text for segment in segments] == paragraphs


def test_a_lone_heading_joins_a_neighbour() -> None:
    text = "one two three four five.\n\n\nTitle\n\n\n" + "six seven eight nine ten. " * 4
    segments = split([Document("h", text)], words(), 10)
    assert [len(segment.text.split()) for segment in segments] == [6, 10, 10]


def test_a_document_that_fits_is_one_segment() -> None:
    text = "\n\n" + prose(5)
    segments = split([Document("s", text), Document("t", text)], byte_level(), 4096)
    assert [(s.index, s.source, s.start, s.end) for s in segments] == [
        (0, "s", 0, len(text)),
        (1, "t", 0, len(text)),
    ]


def test_pages() -> None:
    pages = ["first page here.\n\n", "second page here.\n\n", "third page here."]
    starts = (0, len(pages[0]), len(pages[0] + pages[1]))
    segments = split([Document("p", "".join(pages), starts)], words(), 3)
    assert [(segment.page, segment.text) for segment in segments] == list(enumerate(pages, 1))


def test_blanks_only_stand_alone_where_they_must() -> None:
    text = "word word word" + "\n" * 12 + "word word word"
    segments = split([Document("b", text)], byte_level(), 16)
    assert all(segment.text.strip() for segment in segments)


def test_a_function_that_counts_serves_too() -> None:
    document = Document("d", prose(60))
    count = 0

    def counts(text: str) -> int:
        nonlocal count
        count += 1
        return tokens_of(text, words())

    assert split([document], counts, 40) == split([document], words(), 40)
    assert count > 0


def test_the_tokenizer_is_left_as_it_was() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(words().backend_tokenizer.to_str()), unk_token="[UNK]"
    )
    tokenizer.backend_tokenizer.enable_truncation(4)
    document = Document("d", prose(60))
    assert split([document], tokenizer, 40) == split([document], words(), 40)
    truncation = tokenizer.backend_tokenizer.truncation
    assert truncation is not None
    assert truncation["max_length"] == 4


CHAPTERS = "Title\n\n\n\n\n" + "".join(prose(500, seed) + "\n\n\n\n\n" for seed in range(8))
LETTERS = "".join(random.Random(0).choices("abcdefghij", k=600_000))


# Headings between wide gaps make the splitter ask for the length of whole chapters; and it looks
# at the whole rest of a text that has nowhere to cut for each place where it cuts.
@pytest.mark.parametrize("text", [CHAPTERS, LETTERS], ids=["chapters", "no blanks"])
def test_a_long_text_is_tokenized_a_few_times_at_most(text: str) -> None:
    tokenizer, counting = byte_level(), Counting(byte_level())
    segments = split([Document("long", text)], counting, 512)  # type: ignore[arg-type]
    assert counting.characters < 6 * len(text)
    check([Document("long", text)], segments, tokenizer, 512)


class Counting:
    """A tokenizer that counts the characters it is given."""

    truncation = padding = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.characters = 0
        self.backend_tokenizer = self
        self._encode = tokenizer.backend_tokenizer.encode

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        self.characters += len(text)
        return self._encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("document_tokens", "window", "expected"),
    [
        (100, 8192, 512),  # a short document
        (4096, 8192, 512),
        (4097, 8192, 513),  # rounded up, so that there are never more than eight
        (10_000, 8192, 1250),
        (1_000_000, 8192, 2048),  # a quarter of the window
        (1_000_000, 131_072, 4096),
        (1_000_000, 1024, 256),
        (0, 0, 16),
    ],
)
def test_default_segment_tokens(document_tokens: int, window: int, expected: int) -> None:
    assert default_segment_tokens(document_tokens, window) == expected


def test_a_segment_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="segment_tokens"):
        split([Document("d", "text")], words(), 0)
