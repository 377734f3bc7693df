"""Streams: windows, resuming to the bit, sources, positions in files."""

import dataclasses
import json
from itertools import islice

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.prepare import prepare_data
from jaxglue.data.readers import source_parts
from jaxglue.data.stream import StreamIterator, TokenStream
from jaxglue.data.tokenize import encode_here

SIZES = {"steps": 100, "batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture
def open_stream(make_tokenizer):
    def make(*data, encode=encode_here, **options):
        options = {"seq_len": 64, "stream_tokens": 4096, "streaming": True, **options}
        return TokenStream(DataConfig(data=data, **options), make_tokenizer("plain"), encode=encode)

    return make


@pytest.fixture
def iterate():
    """Make iterators, closed after the test."""
    made = []

    def make(stream, **options):
        made.append(StreamIterator(stream, next(stream.windows()), **{**SIZES, **options}))
        return made[-1]

    yield make
    for iterator in made:
        iterator.close()


def tokens(steps):
    return [np.asarray(batch.tokens) for step in steps for batch in step.micro_batches]


def test_windows_hold_every_row_once_in_a_pass(open_stream, write_jsonl):
    stream = open_stream(write_jsonl([{"text": f"row {number}"} for number in range(1000)]))
    first, second = islice(stream.windows(), 2)
    assert second.start == first.end and first.end[0].rows == first.rows
    assert 4096 <= first.dataset.lengths.sum() < 4096 + 64 * 10
    wrapped = next(window for window in stream.windows() if window.end[0].passes)
    rows = sum(window.rows for window in islice(stream.windows(), wrapped.index + 1))
    assert rows == 1000 * wrapped.end[0].passes + wrapped.end[0].rows


def test_state_resumes_to_the_bit_in_a_later_window(open_stream, iterate, write_jsonl, chat_rows):
    path = write_jsonl(chat_rows(300))
    iterator = iterate(open_stream(path))
    list(islice(iterator, 40))
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["window"]["index"] > 0
    expected = [step.micro_batches for step in islice(iterator, 30)]
    resumed = iterate(open_stream(path))
    resumed.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, expected, [step.micro_batches for step in islice(resumed, 30)])


def test_state_of_other_data_is_refused(open_stream, iterate, write_jsonl, chat_rows):
    state = iterate(open_stream(write_jsonl(chat_rows(300)))).get_state()
    other = iterate(open_stream(write_jsonl(chat_rows(300, seed=1))))
    with pytest.raises(ValueError, match="the data order would differ: data"):
        other.set_state(state)


def test_streams_under_way_outlast_tokens_in_caches(open_stream, write_jsonl, chat_rows, monkeypatch):
    path = write_jsonl(chat_rows(300))
    before = open_stream(path).fingerprint
    monkeypatch.setattr("jaxglue.data.tokenize._VERSION", 99)
    assert open_stream(path).fingerprint == before


def test_processes_share_the_rows_of_one(open_stream, iterate, write_jsonl, chat_rows):
    stream = open_stream(write_jsonl(chat_rows(300)))
    whole = tokens(islice(iterate(stream), 20))
    parts = [tokens(islice(iterate(stream, process_index=i, process_count=2), 20)) for i in range(2)]
    for one, *rows in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(one, np.concatenate(rows))


def test_sources_have_their_shares_in_every_window(open_stream, write_jsonl):
    few = write_jsonl([{"text": "a b c"}] * 10, "few.jsonl")
    many = write_jsonl([{"text": "d e f g h"}] * 5000, "many.jsonl")
    stream = open_stream(f"{few}?share=0.25", f"{many}?share=0.75")
    end = list(islice(stream.windows(), 5))[-1].end
    assert end[0].tokens / sum(place.tokens for place in end) == pytest.approx(0.25, abs=0.02)
    assert end[0].passes > 10 > end[1].passes


def test_a_source_of_a_small_share_is_in_some_windows_alone(open_stream, write_jsonl):
    """A window then holds no row of it; shares hold to within the 64 rows that are tokenized together."""
    few = write_jsonl([{"text": "a b c"}] * 200, "few.jsonl")
    many = write_jsonl([{"text": "d e f g h"}] * 5000, "many.jsonl")
    for shares in ((0.02, 0.98), (0.98, 0.02)):
        stream = open_stream(*(f"{name}?share={share}" for name, share in zip((few, many), shares, strict=True)))
        windows = list(islice(stream.windows(), 8))
        assert any(old == new for window in windows for old, new in zip(window.start, window.end, strict=True))
        for window in windows:
            done = [place.tokens / share for place, share in zip(window.end, shares, strict=True)]
            assert abs(done[0] - done[1]) <= 64 * 20 / min(shares)


def test_a_stream_of_pairs_is_refused(open_stream, write_jsonl):
    path = write_jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match=r"does not fit the objective: choose an --objective such as dpo"):
        open_stream(f"{path}?format=preference")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
@pytest.mark.parametrize("skip", [0, 1, 7, 20, 30])
def test_rows_are_read_on_from_a_place(tmp_path, name, skip):
    rows = [{"text": f"row {number}"} for number in range(20)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=6)
    elif name.endswith("csv"):
        path.write_text("\n".join(["text", *(row["text"] for row in rows)]))
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(pa.compress(lines, "gzip", asbytes=True) if name.endswith("gz") else lines)
    whole, rest = (list(source_parts(Source(name=str(path)))[0](count)) for count in (0, skip))
    assert rest == whole[skip:]


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_long_documents_are_cut_in_memory(open_stream, write_jsonl, overlong):
    rows = [{"text": "a b c " * 2000}, {"text": "short"}] * 40
    window = next(open_stream(write_jsonl(rows), overlong=overlong).windows())
    assert window.dataset.store.lengths.max() == 65 and window.dataset.lengths.max() <= 64
    cut = window.selection.truncated if overlong == "truncate" else window.selection.dropped
    assert cut == (window.dataset.store.lengths == 65).sum() > 0


def test_an_overlong_row_of_a_stream_is_named(open_stream, write_jsonl):
    rows = [{"text": "short"}] * 100 + [{"text": "long " * 200}]
    stream = open_stream(write_jsonl(rows), overlong="error")
    with pytest.raises(ValueError, match=r"data\.jsonl:101: \d+ tokens, but seq_len=64"):
        next(stream.windows())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eval_fraction": 0.1}, "use eval_data"),
        ({"data": ("a.jsonl?weight=2",)}, "shares, not weights"),
        ({"data": ("a.jsonl", "b.jsonl")}, "need a share each"),
    ],
)
def test_settings_that_need_all_data_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"data": ("a.jsonl",), **options}, streaming=True)


def test_columns_that_are_not_used_are_named(write_jsonl, make_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxglue.data.stream.encode_in_processes", lambda *given, workers: encode_here(*given))
    path = write_jsonl([{"text": "What is 1?", "source": "web"}])
    config = DataConfig(data=(path,), eval_data=(path,), streaming=True, stream_tokens=64, cache_dir=str(tmp_path))
    notes = prepare_data(config, make_tokenizer("plain")).report.notes
    assert notes[1:] == (f"{path}: columns that the format text does not use: 'source'",)


def test_prepare_reports_the_first_window(write_jsonl, chat_rows, make_tokenizer, tmp_path):
    config = DataConfig(
        data=(write_jsonl(chat_rows(200)),),
        seq_len=64,
        stream_tokens=2048,
        streaming=True,
        cache_dir=str(tmp_path / "c"),
    )
    prepared = prepare_data(config, make_tokenizer("plain"))
    total = sum(place.tokens for place in prepared.window.end)
    assert f"first window of {total:,} tokens" in str(prepared.report) and 2048 <= total < 2048 + 64 * 64
    assert prepared.report.rows == prepared.window.rows < 200 and not (tmp_path / "c").exists()


def test_windows_smaller_than_the_rows_tokenized_together_follow_each_other(
    open_stream, iterate, write_jsonl, chat_rows
):
    stream = open_stream(write_jsonl(chat_rows(100)), stream_tokens=100)
    assert all(window.rows for window in islice(stream.windows(), 6))
    assert len(list(islice(iterate(stream), 100))) == 100


def test_a_window_ends_with_a_pass_over_every_source(open_stream, write_jsonl):
    few, more = (write_jsonl([{"text": "a b c"}] * count, f"{count}.jsonl") for count in (10, 200))
    first, second = islice(open_stream(few, stream_tokens=2**23).windows(), 2)
    assert first.rows == 20 and second.end[0].passes == 2
    window = next(open_stream(f"{few}?share=0.5", f"{more}?share=0.5", stream_tokens=2**23).windows())
    assert window.end[1].passes == 1 and 200 < window.rows < 1000


def test_closing_ends_the_tokenizing_of_a_window(open_stream, write_jsonl):
    read, ended = [], []

    def encode(encoder, jobs):
        try:
            for chunk, tag in jobs:
                read.append(len(chunk))
                yield encoder.encode(chunk), tag
        finally:
            ended.append(True)

    path = write_jsonl([{"text": f"row {number}"} for number in range(100_000)])
    stream = open_stream(path, stream_tokens=2**12, encode=encode)
    first = next(windows := stream.windows())
    windows.close()
    stream.config = dataclasses.replace(stream.config, stream_tokens=2**40)
    iterator = StreamIterator(stream, first, **SIZES)
    next(iterator)
    iterator.close()
    assert len(ended) == 2 and sum(read) < 100_000


def test_windows_hold_every_token_of_split_documents(open_stream, tmp_path):
    rows = [{"text": f"{number} " * 100} for number in range(3)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut, split = (
        next(open_stream(str(tmp_path / "long.jsonl"), overlong=how).windows()) for how in ("truncate", "split")
    )
    assert set(cut.dataset.lengths) == {64} and cut.rows == len(cut.dataset)
    assert split.dataset.lengths.sum() == split.dataset.store.lengths.sum() > 100 * split.rows
    assert split.dataset.lengths.max() == 64
