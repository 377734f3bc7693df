"""Conversations with a function that replies, without a model."""

import numpy as np
import pytest

from jaxglue.generation.engine import Completion
from jaxglue.rl.episodes import Episodes
from jaxglue.rl.prompts import Prompt
from tests.rl.forced import converse, environment_of

TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_tokens_between_turns_are_the_templates(make_tokenizer, end):
    tokenizer = make_tokenizer(None, eos_token=end)
    tokenizer.chat_template = TURNS.replace("END", end)
    messages = [{"role": "user", "content": "a box?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = Prompt("rows:1", messages, tokenizer.encode(rendered), {})

    replies = iter([[{"role": "user", "content": "six?"}], 0.5])
    said, asked = iter(["exit", "no"]), []

    def write(turn):
        asked.append(turn.prompt)
        return next(said) + end

    [[answer]] = converse(environment_of(tokenizer, lambda messages, last: next(replies)), [prompt], write, tokenizer)
    between = f"\nuser: six?{end}\nassistant: "
    assert tokenizer.decode(asked[1]) == f"{rendered}exit{end}{between}"
    assert tokenizer.decode(answer.tokens[~answer.counted]) == between
    assert tokenizer.decode(answer.tokens) == f"exit{end}{between}no{end}"
    assert answer.episode.rewards["environment"] == 0.5


def test_conversations_of_held_out_prompts_have_random_numbers_of_their_own(make_tokenizer):
    tokenizer, seen = make_tokenizer(), []
    tokenizer.chat_template = CALLS
    prompt = Prompt("rows:1", [{"role": "user", "content": "a box?"}], [1], {})

    def write(turn):
        seen.append((turn.seed, turn.index, turn.answer))
        return tokenizer.eos_token

    environment = environment_of(tokenizer, lambda messages, last: "more", turns=2)
    converse(environment, [prompt] * 2, write, tokenizer, numbers=[(1 << 30) + n for n in range(2)], count=8)
    assert len({tuple(number & 0xFFFFFFFF for number in name) for name in seen}) == 32


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALLS = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% if m.tool_calls and m.tool_calls | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_conversation(tokenizer, said, reply, turns=4, ended=True):
    """Return an answer of one conversation: `said` in turns, `reply` to each."""
    tokenizer.chat_template = CALLS
    messages = [{"role": "user", "content": "a box?"}]
    rendered = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    prompt = Prompt("rows:1", messages, tokenizer.encode(rendered), {}, tools=TOOLS)

    turns_said = iter(said)
    environment = environment_of(tokenizer, reply, turns=turns)
    [[answer]] = converse(environment, [prompt], lambda turn: next(turns_said) + "<|im_end|>", tokenizer, ended=ended)
    return answer


def call(*values):
    return "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>' for value in values)


def test_results_of_tools_follow_the_calls_by_the_template(make_tokenizer):
    tokenizer, seen = make_tokenizer(), []

    def reply(messages, last):
        seen.append(messages[-1])
        calls = seen[-1].get("tool_calls")
        return [{"role": "tool", "content": str(c["function"]["arguments"]["a"] + 1)} for c in calls] if calls else 1.0

    answer = make_conversation(tokenizer, ["hm" + call(1, 5), "<think>so</think>it is"], reply)
    assert seen[0]["content"] == "hm"
    assert [c["function"] for c in seen[0]["tool_calls"]] == [{"name": "add", "arguments": {"a": a}} for a in (1, 5)]
    between = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer.tokens[~answer.counted]) == between
    assert answer.episode.rewards["environment"] == 1.0
    assert [m["role"] for m in answer.episode.messages] == ["assistant", "tool", "tool", "assistant"]
    names = {(m["name"], m["tool_call_id"]) for m in answer.episode.messages if m["role"] == "tool"}
    assert names == {("add", c["id"]) for c in seen[0]["tool_calls"]}


def test_a_template_that_drops_earlier_thinking_can_be_continued(make_tokenizer):
    tokenizer = make_tokenizer()
    replies = iter([[{"role": "user", "content": "say ■ more"}], [{"role": "user", "content": "and"}], 0.5])
    answer = make_conversation(
        tokenizer, ["<think>a</think>b", "<think>c</think>d", "e"], lambda messages, last: next(replies)
    )
    texts = [f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("say ■ more", "and")]
    assert tokenizer.decode(answer.tokens[~answer.counted]) == "".join(texts)


def test_calls_that_the_template_refuses_end_a_conversation(make_tokenizer, caplog):
    answer = make_conversation(make_tokenizer(), [call(1, 2, 3)], lambda *_: [{"role": "tool", "content": "1"}])
    assert answer.counted.all() and np.isnan(answer.episode.rewards["environment"])
    assert "rows:1: the chat template refuses the conversation" in caplog.text


@pytest.mark.parametrize(("turns", "ended"), [(2, True), (4, False)])
def test_the_environment_knows_when_nothing_more_can_be_said(make_tokenizer, turns, ended):
    known = []

    def reply(messages, last):
        known.append(last)
        return 0.0 if last else [{"role": "user", "content": "more"}]

    said = ["a", "b"] if ended else ["a"]
    answer = make_conversation(make_tokenizer(), said, reply, turns=turns, ended=ended)
    assert known == ([False, True] if ended else [True]) and answer.episode.rewards["environment"] == 0.0


def test_no_token_of_a_long_episode_is_encoded_again(make_tokenizer):
    """Tokens that no encoding yields, over many turns."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    content = [{"role": "user", "content": "read"}]
    environment = environment_of(tokenizer, lambda messages, last: "a page", turns=30, longest=70_000, row=80_000)
    prompt = Prompt("rows:1", content, environment.template.prompt(content, None), {})
    rng, written = np.random.default_rng(0), list[int]()
    with Episodes(environment, [prompt], [0], 1, 0) as episodes:
        (source,) = episodes.sources(1)
        while not source.is_over:
            for turn in source.ready():
                tokens = np.array([*rng.integers(5, tokenizer.vocab_size, 2000), end], np.int32)
                written += tokens.tolist()
                log_probs = np.zeros(len(tokens), np.float32)
                source.take(turn, Completion(0, 0, tokens, log_probs, log_probs, None, "stop"))
            if not source.is_over:
                source.wait()
        ((sample,),) = episodes.samples()
    assert len(sample.tokens) > 60_000 and sample.tokens[sample.counted].tolist() == written
    assert tokenizer.encode(tokenizer.decode(written)) != written
