"""The three prompts of the pattern, built from the model's own chat template.

A chat template wraps the user's message. The message here is long: the document, then what is
asked. So the template is rendered once around a placeholder and cut there; the first part opens
the main sequence, the last part closes every branch. The wording follows the method of Writing in
the Margins (arXiv:2408.14906): extract after a segment, judge the extract, answer from the context
and the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from postil.errors import UnsupportedModel

_PLACEHOLDER = "postil-content-7d1f"

DOCUMENT_OPENS = "Here is a text.\n\n"
EXTRACT = (
    "\n\n---\nUsing the text above, copy out whatever is relevant to this question: {question}\n"
    'Be brief. If nothing is relevant, say "Nothing relevant."'
)
CLASSIFY = (
    "Question: {question}\n\nNote: {note}\n\n"
    "Does the note help to answer the question? Reply with one word, YES or NO."
)
ANSWER = "\n\n---\n{notes}Using the text above, answer this question: {question}"
ANSWER_FROM_NOTES = "{notes}Using the notes above, answer this question: {question}"
NOTES = "Notes taken while reading:\n{notes}\n\n"


class Prompts:
    """Token ids of every prompt, for one model.

    What a user or a document says is never read as the template's own tokens, whatever it spells.

    Attributes:
        opening: what the main sequence starts with, before the first segment.
        stop_tokens: ids that end the model's turn according to its template.
        yes, no: first tokens of the two verdicts, in their usual spellings.

    Raises:
        UnsupportedModel: the chat template cannot be rendered.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        before, after, end_of_turn = self._template()
        self._before = before
        self._after = after
        self.opening = [*before, *self.encode(DOCUMENT_OPENS)]
        self.stop_tokens = frozenset(end_of_turn)
        self.yes = self._first_tokens("YES", "Yes", "yes")
        self.no = self._first_tokens("NO", "No", "no")

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text: no special tokens are added, and none are read into it."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def extract(self, question: str) -> list[int]:
        """Follows a segment."""
        return [*self.encode(EXTRACT.format(question=question)), *self._after]

    def classify(self, question: str, note: str) -> list[int]:
        """A sequence of its own."""
        text = CLASSIFY.format(question=question, note=note.strip())
        return [*self._before, *self.encode(text), *self._after]

    def classify_stem(self, question: str) -> list[int]:
        """What classification prompts of one question begin with, whatever the note."""
        prompt = self.classify(question, "A")
        return prompt[: shared_length(prompt, self.classify(question, "7"))]

    def answer(self, question: str, notes: Sequence[str]) -> list[int]:
        """Follows the context."""
        text = ANSWER.format(question=question, notes=_listed(notes))
        return [*self.encode(text), *self._after]

    def answer_from_notes(self, question: str, notes: Sequence[str]) -> list[int]:
        """A sequence of its own, where the context does not fit."""
        text = ANSWER_FROM_NOTES.format(question=question, notes=_listed(notes))
        return [*self._before, *self.encode(text), *self._after]

    def condense(self, question: str, notes: Sequence[str]) -> list[int]:
        """A sequence of its own: notes are read as a text is, to write a note about them."""
        text = DOCUMENT_OPENS + "\n".join(notes) + EXTRACT.format(question=question)
        return [*self._before, *self.encode(text), *self._after]

    def _template(self) -> tuple[list[int], list[int], list[int]]:
        """What stands before and after the user's content, and what ends the model's turn."""
        if not self._tokenizer.chat_template:
            opening = self._tokenizer("").input_ids  # BOS, where the model wants one
            eos = self._tokenizer.eos_token_id
            opening = [token for token in opening if token != eos]
            return opening, self.encode("\n\nAnswer:"), []
        user = {"role": "user", "content": _PLACEHOLDER}
        reply = {"role": "assistant", "content": _PLACEHOLDER}
        try:
            asked = self._render([user], add_generation_prompt=True)
            replied = self._render([user, reply], add_generation_prompt=False)
        except (TemplateError, ValueError, TypeError) as error:
            raise UnsupportedModel(
                f"the model's chat template cannot be rendered ({error}): choose an instruct model"
            ) from error
        before, found, after = asked.partition(_PLACEHOLDER)
        if not found:
            raise UnsupportedModel(
                "the model's chat template leaves out the user's message: choose an instruct model"
            )
        ends = self._template_tokens(replied.rpartition(_PLACEHOLDER)[2])
        special = set(self._tokenizer.all_special_ids)
        return (
            self._template_tokens(before),
            self._template_tokens(after),
            [token for token in ends[:1] if token in special],
        )

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,  # read only by templates that can think
        )

    def _template_tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids if text else []

    def _first_tokens(self, *words: str) -> list[int]:
        spellings = [spelling for word in words for spelling in (word, " " + word)]
        return sorted({ids[0] for s in spellings if (ids := self.encode(s))})


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _listed(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return NOTES.format(notes="\n".join("- " + " ".join(note.split()) for note in notes))
