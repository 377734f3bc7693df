"""`jaxglue data preview`: documents with their masks, and statistics."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from jaxglue.commands import main
from jaxglue.data.report import length_bins


@pytest.fixture
def preview(tmp_path, make_tokenizer, capsys):
    make_tokenizer().save_pretrained(tmp_path / "model")

    def run(data, *flags):
        cache = str(tmp_path / "cache")
        argv = ["preview", "--model", str(tmp_path / "model"), "--data", data, "--cache-dir", cache, "--seq-len", "64"]
        main(["data", *argv, *flags])
        return capsys.readouterr().out

    return run


def test_shows_masks_lengths_packing_duplicates_and_longest_rows(tmp_path, preview, write_jsonl):
    row = {"messages": [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "It is 2. ✓"}]}
    long = {"messages": [{"role": "user", "content": "What " * 20}, {"role": "assistant", "content": "Good"}]}
    shown = preview(write_jsonl([row, row, long]), "--rows", "1", "--picture", str(tmp_path / "lengths.png"))
    assert "<|im_start|>user\nGrüße?<|im_end|>\n<|im_start|>assistant\n⟦It is 2. ✓<|im_end|>⟧" in shown
    assert "3 rows of format messages" in shown and "% full" in shown
    assert "duplicates: 1 documents" in shown
    assert "data.jsonl:3" in shown.split("longest: ")[1]
    assert (tmp_path / "lengths.png").read_bytes()[1:4] == b"PNG"


def test_words_of_sentencepiece_have_their_spaces(tmp_path, preview, write_jsonl):
    words = {"<unk>": 0, "</s>": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}, "▁": 258, "a": 259, "▁a": 260}
    backend = Tokenizer(models.BPE(vocab=words, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "model")
    shown = preview(write_jsonl([{"prompt": "a a é", "completion": " a✓ a"}]), "--rows", "1")
    assert "a a é⟦ a✓ a</s>⟧" in shown


def test_long_documents_are_cut(preview, write_jsonl):
    assert "⟦What …" in preview(write_jsonl([{"text": "What is 1?"}]), "--max-tokens", "1")


def test_rows_have_the_models_positions_where_these_are_few(tmp_path, preview, write_jsonl, tiny_config):
    config = tiny_config | {"model_type": "qwen3", "max_position_embeddings": 2048}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    path = write_jsonl([{"text": "What is 1?"}])
    assert "rows: 64 tokens\n" in preview(path)
    assert "rows: 2,048 tokens (all positions of the model" in preview(path, "--seq-len", "none")


def test_answers_of_a_pair_stand_in_lines(preview, write_jsonl):
    pair = {"prompt": "What is 1? ", "chosen": "It is 1.", "rejected": "Good"}
    shown = preview(write_jsonl([pair, pair | {"rejected": "2"}]), "--rows", "1", "--objective", "dpo")
    assert "What is 1? ⟦It is 1." in shown and "⟧\n⟦Good" in shown


def test_every_length_is_in_one_bin():
    lengths = np.array([1, 5, 12, 13, 24])
    bins = length_bins(lengths)
    assert sum(bar.documents for bar in bins) == 5
    assert all(bar.documents == ((lengths >= bar.low) & (lengths <= bar.high)).sum() for bar in bins)


def test_unknown_words_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["data", "show"])
    assert "jaxglue data: use jaxglue data preview" in capsys.readouterr().err
