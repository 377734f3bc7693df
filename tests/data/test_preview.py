"""`jaxglue data preview`: documents with their masks, and statistics."""

import json

import numpy as np
import pytest

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
