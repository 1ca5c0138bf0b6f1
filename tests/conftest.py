"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_network, tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random llama and its tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = tiny_tokenizer()
    tiny_network("llama", len(tokenizer), 2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
