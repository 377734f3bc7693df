"""Tokens that a run adds to tokenizer and vocabulary."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.models.vocabulary import grow_vocabulary
from jaxglue.training.vocabulary import add_tokens, read_vocabulary
from jaxglue.training.workload import read_architecture, settle


def vocabulary(config, path, text):
    path.write_text(text, encoding="utf-8")
    config = replace(config, model=replace(config.model, new_tokens=path))
    folder = config.model.folder
    base = read_architecture(config, folder)
    grown = read_vocabulary(folder, path, base, None)
    return settle(config, base, devices=1, vocabulary=grown), grown


def resize(model_folder, size):
    path = model_folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 400', f'"vocab_size": {size}'))


def test_new_tokens_grow_the_vocabulary_to_a_multiple_and_train(make_config, model_folder, tmp_path):
    resize(model_folder, 346)  # as many as the tokenizer has
    config, grown = vocabulary(make_config(), tmp_path / "new.txt", "<|tool|>\n\nZürich\n")
    assert len(grown.new) == 2 and grown.size % 64 == 0 and grown.size > grown.base_size == 346
    assert config.lora.trainable_token_indices == tuple(range(346, grown.size))
    ids = grown.tokenizer.encode("a<|tool|>b Zürich", add_special_tokens=False)
    assert set(grown.new) < set(ids)


def test_unused_rows_of_the_base_are_taken_first(make_config, tmp_path):
    config, grown = vocabulary(make_config(), tmp_path / "new.txt", "<|tool|>\n")
    assert grown.size == grown.base_size == 400
    assert config.lora.trainable_token_indices == grown.new == (346,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: expected a token a line"),
        ("<a>\n<a>\n", "has '<a>' twice"),
        ("<|im_end|>\n", r"the tokenizer already has <\|im_end\|>"),
        (" <a>\n", "begins or ends with a space"),
    ],
)
def test_bad_files_are_refused(make_tokenizer, tmp_path, text, message):
    (tmp_path / "new.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        add_tokens(make_tokenizer(), tmp_path / "new.txt")
    with pytest.raises(ValueError, match="expected a text file with a token a line"):
        add_tokens(make_tokenizer(), tmp_path / "absent.txt")


def test_a_byte_order_mark_and_other_separators_are_no_token(make_tokenizer, tmp_path):
    (tmp_path / "new.txt").write_bytes("\ufeff<a>\r\n<b\u2028c>\r\n".encode())
    tokenizer = make_tokenizer()
    added = add_tokens(tokenizer, tmp_path / "new.txt")
    assert tokenizer.convert_ids_to_tokens(added) == ["<a>", "<b\u2028c>"]


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_earlier_ones(tiny_model, tied):
    model = tiny_model(tie_word_embeddings=tied)
    before = [np.asarray(m.weight[...]) for m in (model.embed_tokens, model.lm_head) if m is not None]
    grow_vocabulary(model, (90, 97), 128)
    after = [m.weight[...] for m in (model.embed_tokens, model.lm_head) if m is not None]
    for old, new in zip(before, after, strict=True):
        mean = old[:90].mean(axis=0)
        assert new.shape == (128, 32) and new.dtype == jnp.float32
        np.testing.assert_allclose(new[np.array([90, 97, 127])], [mean] * 3, atol=1e-6)
        np.testing.assert_array_equal(new[91:97], old[91:97])
    assert model.config.vocab_size == 128
