"""A copy of a GGUF is the same model, is used when it may be, and is missed by nobody."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from postil.engine import converted, loading
from postil.engine.loading import Loaded
from tests import tiny

TEXT = "YES, the user said: EXTRACT what is relevant."


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama and its tokenizer as a GGUF, with the names that its converters give."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-llama.gguf"
    network, tokenizer = tiny.tiny_network("llama", vocabulary=512), tiny.tiny_tokenizer()
    config, vocabulary = network.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types([3] * 4 + [1] * (len(tokenizer) - 4))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in network.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies go: a folder that is not there yet."""
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def load(path: Path, dtype: str = "float32") -> Loaded:
    return loading.load(path, dtype=dtype)


def logits(loaded: Loaded) -> torch.Tensor:
    return tiny.plain_logits(loaded.network, loaded.tokenizer(TEXT).input_ids)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copy_is_the_same_model(
    tiny_gguf: Path, copies: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    first = load(tiny_gguf, dtype)
    (copy,) = names(copies)
    assert copy.startswith("tiny-llama-") and copy.endswith(f"-{dtype}")

    monkeypatch.setattr(converted, "_keep", None)  # called, it would be an error
    second = load(tiny_gguf, dtype)
    assert second.network.config._name_or_path == str(copies / copy)
    assert second.name == first.name == str(tiny_gguf)
    assert torch.equal(logits(second), logits(first))
    for what in ("window", "layers", "layer_kinds", "stop_tokens", "dtype", "weight_bytes"):
        assert getattr(second, what) == getattr(first, what)
    messages = [{"role": "user", "content": TEXT}]
    assert second.tokenizer.apply_chat_template(messages) == first.tokenizer.apply_chat_template(
        messages
    )


def test_a_link_to_the_file_shares_its_copy(tiny_gguf: Path, copies: Path, tmp_path: Path) -> None:
    load(tiny_gguf)
    (tmp_path / "link.gguf").symlink_to(tiny_gguf)
    load(tmp_path / "link.gguf")
    assert len(names(copies)) == 1


def test_a_file_that_changed_is_converted_again(
    tiny_gguf: Path, copies: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny-llama.gguf"  # of the same name as another, which keeps its copy
    shutil.copy(tiny_gguf, path)
    load(tiny_gguf)
    (kept,) = names(copies)
    load(path)
    load(path, "bfloat16")
    before = set(names(copies)) - {kept}
    assert len(before) == 2

    os.utime(path, ns=(0, 0))
    load(path)
    (after,) = set(names(copies)) - {kept}
    assert after not in before


@pytest.mark.parametrize("damage", ["no weights", "weights cut short", "no configuration", "empty"])
def test_a_damaged_copy_is_made_again(tiny_gguf: Path, copies: Path, damage: str) -> None:
    expected = logits(load(tiny_gguf))
    (copy,) = copies.iterdir()
    files = sorted(path.name for path in copy.iterdir())
    weights = copy / "model.safetensors"
    if damage == "weights cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    for path in list(copy.iterdir()):
        if damage == "empty" or (damage, path.name) in {
            ("no weights", weights.name),
            ("no configuration", "config.json"),
        }:
            path.unlink()
    assert torch.equal(logits(load(tiny_gguf)), expected)
    assert names(copy) == files


def test_no_copy_without_plenty_of_space(
    tiny_gguf: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    bytes_needed = 2 * load(tiny_gguf).weight_bytes
    for free, expected in ((bytes_needed - 1, 0), (bytes_needed, 1)):
        shutil.rmtree(copies)
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: usage(2 * free, free, free))
        load(tiny_gguf)
        assert len(names(copies)) == expected


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "file"))
    assert load(tiny_gguf).window == 512


def test_an_interrupted_copy_leaves_nothing(
    tiny_gguf: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        assert len(names(copies)) == 1  # the weights are there already
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(tiny_gguf)
    assert names(copies) == []
    load(tiny_gguf)
    assert len(names(copies)) == 1


def test_loading_is_silent(tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_gguf)
    load(tiny_gguf)
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.is_progress_bar_enabled()


@pytest.mark.network
@pytest.mark.slow
def test_the_default_from_its_copy() -> None:
    first, second = loading.load(dtype="bfloat16"), loading.load(dtype="bfloat16")
    assert torch.equal(logits(first), logits(second))
    assert first.tokenizer.chat_template == second.tokenizer.chat_template
    assert first.stop_tokens == second.stop_tokens
