"""Data preparation from files to data sets: report, cache and errors."""

import io
import itertools
import json
import re

import numpy as np
import pytest

from jaxglue.data.config import DataConfig
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.prepare import prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.terminal.console import Console


@pytest.fixture
def prepare(tmp_path, make_tokenizer):
    """Run `prepare_data` with the plain ChatML tokenizer and a fresh cache."""

    def run(data, *, tokenizer=None, vocab_size=None, progress=None, **options):
        config = DataConfig(data=data, cache_dir=str(tmp_path / "cache"), **{"seq_len": 128, **options})
        return prepare_data(config, tokenizer or make_tokenizer(), vocab_size, progress)

    return run


def test_the_report_counts(prepare, write_jsonl, chat_rows):
    console = Console(file=io.StringIO())
    progress = DataProgress(console, clock=itertools.count(0, 10).__next__)
    prepared = prepare(write_jsonl(chat_rows(50)), eval_fraction=0.1, progress=progress)
    report = prepared.report
    assert (report.format, report.rows, report.train.documents, report.eval.documents) == ("messages", 50, 45, 5)
    assert report.train.tokens == prepared.train.lengths.sum()
    assert report.train.efficiency == report.train.tokens / (128 * report.train.packed_rows)
    line = r"tokenizing \S*data.jsonl: 0.0 of 0.0 MB, 0.00 MB/s, 0:00:00 left\n"
    assert re.search(line, console.file.getvalue().replace("\n\n", "\n"))
    assert "50 rows of format messages" in str(report)
    assert len(list(epoch(prepared))) == -(-report.train.packed_rows // 2)
    with_loss = sum(batch.loss_weights.sum() for step in epoch(prepared) for batch in step.micro_batches)
    assert with_loss == report.train.target_tokens < report.train.tokens


def epoch(prepared):
    return BatchIterator(prepared.train, seq_len=128, batch_size=2, epochs=1)


def test_held_out_documents_are_disjoint_and_seeded(prepare, write_jsonl, chat_rows):
    path = write_jsonl(chat_rows(50))
    one, same, other = (prepare(path, eval_fraction=0.2, seed=seed) for seed in (0, 0, 1))
    assert not set(one.train.documents) & set(one.eval.documents)
    assert {*prepare(path, eval_fraction=10).eval.documents} == {*one.eval.documents}
    assert one.fingerprint == same.fingerprint != other.fingerprint


def pieces(dataset) -> list[list[int]]:
    return [dataset.store.tokens[dataset.indices(document)].tolist() for document in range(len(dataset))]


def test_split_documents_are_pieces_that_hold_every_token(prepare, write_jsonl, chat_rows):
    texts = [{"text": f"{number} " * (20 + 30 * number)} for number in range(4)]
    path, chats = write_jsonl(texts), write_jsonl(chat_rows(3), "chats.jsonl")
    whole = prepare(path, seq_len=4096).train
    split = prepare(path, seq_len=32, overlong="split")
    assert split.report.truncated == 0 and split.report.dropped == 0
    assert [token for piece in pieces(split.train) for token in piece] == [t for one in pieces(whole) for t in one]
    assert max(split.train.lengths) == 32 and split.report.train.documents == len(split.train) > len(whole)
    assert split.report.train.target_tokens == whole.targets.sum() - (len(split.train) - len(whole))
    assert split.fingerprint != prepare(path, seq_len=32).fingerprint
    rows = BatchIterator(split.train, seq_len=32, batch_size=1, epochs=1)
    seen = [tuple(batch.tokens[batch.segments.segment_ids > 0]) for step in rows for batch in step.micro_batches]
    assert sorted(token for row in seen for token in row) == sorted(t for one in pieces(whole) for t in one)
    both = prepare((path, chats), seq_len=256, overlong="split").train
    alone = prepare(path, seq_len=256, overlong="split").train
    by_source = prepare((f"{path}?overlong=split", chats), seq_len=256, overlong="drop").train
    assert pieces(by_source) == pieces(both)
    assert pieces(both)[: len(alone)] == pieces(alone) and pieces(both)[len(alone) :] == pieces(prepare(chats).train)


def test_pieces_of_a_document_are_held_out_together(prepare, write_jsonl):
    path = write_jsonl([{"text": f"{number} " * 90} for number in range(6)])
    prepared = prepare(path, seq_len=32, overlong="split", eval_fraction=2)
    assert len(set(prepared.eval.documents)) == 2 and len(set(prepared.train.documents)) == 4
    assert not set(prepared.eval.documents) & set(prepared.train.documents)


def test_separate_held_out_data(prepare, write_jsonl, chat_rows):
    prepared = prepare(write_jsonl(chat_rows(9)), eval_data=write_jsonl(chat_rows(4, seed=1), "eval.jsonl"))
    assert (prepared.report.rows, len(prepared.train), len(prepared.eval)) == (13, 9, 4)


def test_cache_is_reused_until_something_changes(prepare, write_jsonl, chat_rows, make_tokenizer):
    path = write_jsonl(chat_rows(5))
    first, again = prepare(path), prepare(path, seq_len=64)
    assert (first.report.cached, again.report.cached) == (False, True)
    assert not prepare(path, loss_on="all").report.cached
    assert not prepare(path, tokenizer=make_tokenizer("marked")).report.cached
    write_jsonl(chat_rows(6))
    assert not prepare(path).report.cached


def test_processes_give_the_same_tokens(tmp_path, prepare, write_jsonl, chat_rows):
    path = write_jsonl(chat_rows(600))
    alone = prepare(path, workers=1)
    together = prepare(path, workers=2, split="unused")  # another cache key
    assert not together.report.cached
    assert alone.fingerprint == together.fingerprint


def test_overlong_documents_follow_the_policy(prepare, write_jsonl):
    path = write_jsonl([{"text": "What is 1?"}, {"text": "Good question. " * 50}])
    cut = prepare(path, seq_len=32)
    assert (cut.report.truncated, cut.report.dropped, cut.train.lengths.max()) == (1, 0, 32)
    dropped = prepare(path, seq_len=32, overlong="drop")
    assert (dropped.report.truncated, dropped.report.dropped, len(dropped.train)) == (0, 1, 1)
    with pytest.raises(ValueError, match=r"data.jsonl:2: \d+ tokens, but seq_len=32: raise --seq-len"):
        prepare(path, seq_len=32, overlong="error")


def test_documents_without_targets_are_dropped(prepare, write_jsonl):
    late = {"prompt": "Good question. " * 50, "completion": "What"}
    path = write_jsonl([late, {"prompt": "a", "completion": "b"}])
    report = prepare(path, seq_len=32).report
    assert (report.truncated, report.dropped, report.train.documents) == (0, 1, 1)
    with pytest.raises(ValueError, match="no document has a target token within seq_len=32 tokens"):
        prepare(write_jsonl([late], "late.jsonl"), seq_len=32)


def test_named_format_overrides_detection(prepare, write_jsonl, chat_rows):
    rows = [{**row, "text": "What is 1?"} for row in chat_rows(3)]
    assert prepare(write_jsonl(rows), format="text").report.format == "text"


def test_chat_template_file_replaces_the_tokenizers(tmp_path, prepare, write_jsonl, chat_rows, make_tokenizer):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = make_tokenizer(None)
    prepared = prepare(
        write_jsonl(chat_rows(3)), tokenizer=tokenizer, loss_on="all", chat_template=str(tmp_path / "chat.jinja")
    )
    assert "<|im_end|>" not in tokenizer.decode(prepared.train.store.tokens)


USER = {"role": "user", "content": "What is 1?"}
QA = {"question": "What is 1?", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "the data set is empty: no rows in .*data.jsonl"),
        (
            [{"q": 1, "a": 2}],
            {},
            r"data.jsonl:1: unknown row format: the keys are 'q', 'a'; known .* messages: messages;",
        ),
        ([{"text": "a"}, {"q": 1}], {}, r"data.jsonl:2: a row of format 'text' needs 'text'; its keys are 'q'"),
        ([{"text": 1}], {}, r"data.jsonl:1: 'text' must be a string, got int"),
        ([{"messages": []}], {}, r"data.jsonl:1: 'messages' must be a non-empty list"),
        ([{"messages": [{"content": "a"}]}], {}, r"data.jsonl:1: message 1: a message needs 'role' and 'content'"),
        ([{"messages": [{"role": "user"}]}], {}, r"data.jsonl:1: message 1: the 'user' message has no content"),
        (
            [
                {
                    "messages": [
                        USER,
                        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                    ]
                }
            ],
            {},
            r"data.jsonl:1: message 2: arguments of a tool call: malformed JSON",
        ),
        ([{**QA, "image": None}, {**QA, "image": "b.png"}], {}, r"data.jsonl:2: 'image' is not read, as only text is"),
        (
            [{"file_name": "cats/1.JPG", "text": "a cat"}],
            {},
            r"data.jsonl:1: 'file_name' is an image, 'cats/1.JPG', and",
        ),
        (
            [{"messages": [USER]}],
            {},
            r"data.jsonl:1: no assistant turn to train on, only of user: remove the row, or use --loss-on all",
        ),
        ([{"text": ""}], {}, "the loss mask leaves no token to train on in any row"),
        ([{"text": "What"}], {"vocab_size": 5}, r"token id \d+, but the model's vocabulary has 5 entries"),
        ([{"text": "What"}], {"eval_fraction": 0.1}, "eval_fraction=0.1 of 1 documents: no document would be held out"),
        ([{"text": "a b"}] * 2, {"eval_fraction": 0.9}, "of 2 documents: no document would be left to train on"),
    ],
)
def test_unusable_data_are_refused(prepare, write_jsonl, rows, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(write_jsonl(rows), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": ()}, "data is empty: name at least one"),
        ({"data": ""}, "data: an empty name would stand for the current folder"),
        ({"eval_data": ("a", " ")}, "eval_data: an empty name would stand for the current folder"),
        (
            {"data": "a.jsonl?losson=all"},
            r"a.jsonl\?losson=all: unknown option 'losson=all'; did you mean loss_on\?: use",
        ),
        ({"data": "a.jsonl?weight=0"}, r"a.jsonl\?weight=0: weight: expected float > 0, got"),
        ({"data": "a.jsonl?weight=2&share=0.5"}, "weight and share are both given"),
        ({"data": ("a?share=0.5", "b?share=0.6")}, "data: give all sources a share, with a sum of 1, or none"),
        ({"data": ("a?share=0.5", "b")}, "data: give all sources a share, with a sum of 1, or none"),
        ({"data": "a?weight=2", "mix_temperature": 2}, "mix_temperature: the sources have weights"),
        ({"eval_data": "a?weight=2"}, "eval_data: held-out data have no weight"),
        ({"columns": "prompt"}, "columns: expected new=old,new=old, such as prompt=question, got 'prompt'"),
        ({"format": "csv"}, r"format: expected auto \| auto_chat \| messages .*, got 'csv'"),
        ({"overlong": "wrap"}, r"overlong: expected truncate \| split \| drop \| error, got 'wrap'"),
        ({"loss_on": "user"}, r"loss_on: expected assistant \| completion \| last-turn \| all, got 'user'"),
        ({"seq_len": 1}, r"seq_len: expected int >= 2 \| none, got 1"),
        ({"eval_fraction": 1.0}, r"eval_fraction: expected below 1, or a number of documents, got 1\.0"),
        ({"eval_fraction": 0.1, "eval_data": "b"}, "eval_data and eval_fraction are both given"),
        ({"workers": 0}, r"workers: expected int >= 1 \| none, got 0"),
        ({"chat_template": "missing.jinja"}, "chat_template: no such file: missing.jinja"),
    ],
)
def test_invalid_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"data": "a.jsonl", **options})


def test_tokenizer_loads_from_its_folder(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("What is 1?")["input_ids"] == tokenizer("What is 1?")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    saved = (tmp_path / "tokenizer_config.json").read_text()
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == saved


def test_missing_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match=r"no tokenizer in .*: expected one of tokenizer.json.*copy it from the base"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer: no such folder: .*missing"):
        load_tokenizer(tmp_path / "missing")


def test_segments_are_trained_by_their_labels_without_template_or_ends(prepare, write_jsonl, make_tokenizer):
    texts = ["<|im_start|>user\nHi<|im_end|>\n", "It is 3.", " no loss", "<|im_end|>"]
    rows = [{"segments": [{"text": text, "label": text in texts[1::2]} for text in texts]}]
    prepared = prepare(write_jsonl(rows))
    assert prepared.report.format == "segments"
    tokenizer, store = make_tokenizer(), prepared.train.store
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert store.tokens[np.arange(store.offsets[-1])].tolist() == [token for piece in pieces for token in piece]
    assert store.mask[np.arange(store.offsets[-1])].tolist() == [
        int(i % 2) for i, piece in enumerate(pieces) for _ in piece
    ]
    for bad in ("text", [{"text": "a"}], [{"text": 1, "label": True}]):
        with pytest.raises(ValueError, match=r"data.jsonl:1: '(segments|text)' must be"):
            prepare(write_jsonl([{"segments": bad}]))


def test_prompts_made_of_columns_and_first_rows_are_read_anew_when_they_change(prepare, write_jsonl):
    path = write_jsonl([{"q": f"Q{n}", "a": "A", "text": "x"} for n in range(5)])
    made = prepare(f"{path}?prompt=Ask%20{{{{ q }}}}&completion={{{{ a }}}}&rows=3")
    other = prepare(f"{path}?prompt=Say%20{{{{ q }}}}&completion={{{{ a }}}}&rows=3")
    fewer = prepare(f"{path}?prompt=Say%20{{{{ q }}}}&completion={{{{ a }}}}&rows=2")
    assert (made.report.format, made.report.rows, other.report.rows, fewer.report.rows) == (
        "prompt_completion",
        3,
        3,
        2,
    )
    assert not other.report.cached and not fewer.report.cached and made.fingerprint != other.fingerprint
    assert prepare(f"{path}?prompt=Say%20{{{{ q }}}}&completion={{{{ a }}}}&rows=2").report.cached
    with pytest.raises(ValueError, match=r"data.jsonl:1: its prompt or completion cannot be made: 'z' is undefined"):
        prepare(f"{path}?prompt={{{{ z }}}}&completion=b")
    for options, message in (
        ("prompt=a", "give both prompt and completion"),
        ("prompt={% if %}&completion=a", "no Jinja"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(f"{path}?{options}")


@pytest.mark.parametrize(
    ("row", "format", "found", "note"),
    [
        ({"instruction": "I", "output": "O"}, "auto", "alpaca", "--format alpaca_chat renders them as chats"),
        ({"instruction": "I", "output": "O"}, "auto_chat", "alpaca_chat", ""),
        ({"prompt": "P", "completion": "C"}, "auto_chat", "prompt_completion", "as lists of messages"),
        (
            {"prompt": [{"role": "user", "content": "P"}], "completion": [{"role": "assistant", "content": "C"}]},
            "auto",
            "prompt_completion",
            "",
        ),
    ],
)
def test_plain_text_beside_a_chat_template_is_said(prepare, write_jsonl, make_tokenizer, row, format, found, note):
    report = prepare(write_jsonl([row]), format=format, tokenizer=make_tokenizer("plain")).report
    said = [line for line in report.notes if "without the tokenizer's chat template" in line]
    assert report.format == found and len(said) == bool(note) and note in "".join(said)
