"""Several sources in one run: settings of their own, and shares of an epoch."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxglue.data.config import DataConfig, Source
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.mixing import epoch_documents, passes_per_epoch, plan_dataset_epoch
from jaxglue.data.prepare import prepare_data


@pytest.fixture
def prepare(tmp_path, make_tokenizer, write_jsonl):
    """Prepare 40 chats and 10 texts, with options for each source."""
    chats = [{"messages": [{"role": r, "content": f"{n}"} for r in ("user", "assistant")]} for n in range(40)]
    write_jsonl(chats, "chats.jsonl")
    write_jsonl([{"body": f"What is {n} plus {n}?"} for n in range(10)], "texts.jsonl")

    def run(chat_options="", text_options="", **options):
        data = (f"{tmp_path}/chats.jsonl?{chat_options}", f"{tmp_path}/texts.jsonl?columns=text=body&{text_options}")
        config = DataConfig(data=data, cache_dir=str(tmp_path / "cache"), seq_len=64, **options)
        return prepare_data(config, make_tokenizer())

    return run


def test_sources_have_settings_of_their_own(prepare, make_tokenizer):
    data = prepare("loss_on=all&system=Count%26say").train
    plan = plan_dataset_epoch(data, seq_len=64, seed=0, epoch=0)
    batch = data.build_batch(plan, np.arange(plan.rows), plan.documents, seq_len=64, max_segments=16)
    assert batch.loss_weights.sum() == (batch.segments.segment_ids > 0).sum() - len(data)
    text = make_tokenizer().decode(batch.tokens.ravel())
    assert text.count("<|im_start|>system\nCount&say<|im_end|>") == 40
    assert text.count("What is 7 plus 7?") == 1


def test_the_report_names_formats_and_shares(prepare):
    report = prepare("", "weight=2").report
    chats, texts = report.sources
    assert (chats.format, texts.format, chats.documents, texts.passes) == ("messages", "text", 40, 2.0)
    assert report.train.documents == 60 and chats.share + texts.share == pytest.approx(1)
    assert "texts.jsonl: 10 text documents, 2 × an epoch" in str(report)


def test_weights_are_passes_over_a_source_in_an_epoch(prepare):
    data = prepare("weight=0.25", "weight=1.5").train
    counts = [Counter(epoch_documents(data, 0, epoch).tolist()) for epoch in range(4)]
    assert [sum(count[d] for d in range(40)) for count in counts] == [10] * 4
    assert [sum(count[d] for d in range(40, 50)) for count in counts] == [15] * 4
    together = sum(counts, Counter())
    assert all(together[d] == 1 for d in range(40)) and all(together[d] == 6 for d in range(40, 50))


def test_shares_are_of_an_epochs_tokens(prepare):
    even = prepare("share=0.5", "share=0.5").report
    assert [source.share for source in even.sources] == pytest.approx([0.5, 0.5], abs=0.05)
    assert even.train.tokens == pytest.approx(prepare().report.train.tokens, rel=0.05)


def test_a_temperature_raises_the_shares_of_small_sources(prepare):
    plain, warm = prepare().report.sources, prepare(mix_temperature=4.0).report.sources
    assert min(source.passes for source in warm) == 1
    assert abs(warm[0].share - warm[1].share) < abs(plain[0].share - plain[1].share)


def test_mixing_resumes_exactly_and_refuses_other_weights(prepare):
    data = prepare("weight=0.5").train
    sizes = {"seq_len": 64, "batch_size": 2, "epochs": 3}
    one, other = BatchIterator(data, **sizes), BatchIterator(data, **sizes)
    steps = [next(one) for _ in range(one.steps_per_epoch + 2)]
    state = one.get_state()
    other.set_state(state)
    np.testing.assert_array_equal(next(one).micro_batches[0].tokens, next(other).micro_batches[0].tokens)
    halves = [BatchIterator(data, **sizes, process_index=part, process_count=2) for part in range(2)]
    rows = np.concatenate([next(half).micro_batches[0].tokens for half in halves])
    np.testing.assert_array_equal(rows, steps[0].micro_batches[0].tokens)
    with pytest.raises(ValueError, match="the data order would differ"):
        BatchIterator(prepare("weight=2").train, **sizes).set_state(state)
    for iterator in (one, other, *halves):
        iterator.close()


def test_a_system_message_needs_chats(prepare):
    with pytest.raises(ValueError, match=r"texts.jsonl:1: the row is no chat, so it cannot take a system message"):
        prepare(system="Count.")


@pytest.mark.parametrize("weight", ["1e-9", "1e12"])
def test_weights_of_an_empty_or_endless_epoch_are_refused(prepare, weight):
    with pytest.raises(ValueError, match=r"an epoch would have \S+ documents: (raise|lower) the sources' weights"):
        prepare(f"weight={weight}", f"weight={weight}")


def test_a_source_may_be_held_out_whole():
    sources = [Source(name="a"), Source(name="b")]
    assert passes_per_epoch(sources, [0.0, 8.0], 1.0) == (1.0, 1.0)
    assert passes_per_epoch(sources, [0.0, 8.0], 2.0)[1] == 1.0
    with pytest.raises(ValueError, match="a has a share, but eval_fraction holds out all its documents"):
        passes_per_epoch([replace(source, share=0.5) for source in sources], [0.0, 8.0], 1.0)


def test_an_epochs_documents_are_drawn_from_a_shuffled_circle():
    data = SimpleNamespace(sources=np.repeat([0, 1], [40, 10]), passes=(0.5, 1.0))
    first, second = (epoch_documents(data, seed=0, epoch=epoch).tolist() for epoch in (0, 1))
    assert sorted(first[:20] + second[:20]) == list(range(40)) and sorted(first[20:]) == list(range(40, 50))
    for drawn in (first[:20], second[:20], first[20:]):
        assert drawn != sorted(drawn)
    assert epoch_documents(data, seed=1, epoch=0).tolist() != first
