"""Conversations with an environment, without a model."""

import numpy as np
import pytest

from jaxglue.generation.sampling import answer_keys
from jaxglue.rl.environment import Environment
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample

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

    def written(text):
        tokens = np.array(tokenizer.encode(text + end), np.int32)
        return Sample(tokens, np.zeros(len(tokens), np.float32), True, text)

    replies = iter([[{"role": "user", "content": "six?"}], 0.5])
    environment = Environment(lambda episodes: [next(replies)], tokenizer, turns=4, longest=200)
    asked = []

    def turn(prompts, *_):
        asked.extend(prompts)
        return [written("no")]

    [[answer]] = environment.run([prompt], [[written("exit")]], [0], turn)
    between = f"\nuser: six?{end}\nassistant: "
    assert tokenizer.decode(asked[0]) == f"{rendered}exit{end}{between}"
    assert tokenizer.decode(answer.tokens[~answer.counted]) == between
    assert tokenizer.decode(answer.tokens) == f"exit{end}{between}no{end}" and answer.reward == 0.5


def test_conversations_of_held_out_prompts_have_random_numbers_of_their_own(make_tokenizer):
    tokenizer, seen = make_tokenizer(), []
    tokenizer.chat_template = CALLS
    prompt = Prompt("rows:1", [{"role": "user", "content": "a box?"}], [1], {})
    said = Sample(np.array([tokenizer.eos_token_id], np.int32), np.zeros(1, np.float32), True, "")
    more = [{"role": "user", "content": "more"}]
    environment = Environment(lambda episodes: [more for _ in episodes], tokenizer, turns=2, longest=99)

    def turn(prompts, indices, *_):
        seen.extend(indices)
        return [said for _ in prompts]

    environment.run([prompt] * 2, [[said] * 8] * 2, [(1 << 30) + n for n in range(2)], turn)
    keys = answer_keys([(0, number, 0) for number in seen])
    assert len(np.unique(keys, axis=0)) == 16


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

    def written(text):
        tokens = np.array(tokenizer.encode(text + "<|im_end|>"), np.int32)
        return Sample(tokens, np.zeros(len(tokens), np.float32), ended, text)

    first, *later = said
    rest = iter(later)
    environment = Environment(lambda episodes: [reply(episodes[0])], tokenizer, turns=turns, longest=900)
    [[answer]] = environment.run([prompt], [[written(first)]], [0], lambda *_: [written(next(rest))])
    return answer


def call(*values):
    return "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>' for value in values)


def test_results_of_tools_follow_the_calls_by_the_template(make_tokenizer):
    tokenizer, seen = make_tokenizer(), []

    def reply(episode):
        seen.append(episode.messages[-1])
        calls = seen[-1].get("tool_calls")
        return [{"role": "tool", "content": str(c["function"]["arguments"]["a"] + 1)} for c in calls] if calls else 1.0

    answer = make_conversation(tokenizer, ["hm" + call(1, 5), "<think>so</think>it is"], reply)
    assert seen[0]["content"] == "hm"
    assert [c["function"] for c in seen[0]["tool_calls"]] == [{"name": "add", "arguments": {"a": a}} for a in (1, 5)]
    between = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer.tokens[~answer.counted]) == between
    assert answer.reward == 1.0
    assert [m["role"] for m in answer.messages] == ["assistant", "tool", "tool", "assistant"]
    names = {(m["name"], m["tool_call_id"]) for m in answer.messages if m["role"] == "tool"}
    assert names == {("add", c["id"]) for c in seen[0]["tool_calls"]}


def test_a_template_that_drops_earlier_thinking_can_be_continued(make_tokenizer):
    tokenizer = make_tokenizer()
    replies = iter([[{"role": "user", "content": "say ■ more"}], [{"role": "user", "content": "and"}], 0.5])
    answer = make_conversation(tokenizer, ["<think>a</think>b", "<think>c</think>d", "e"], lambda _: next(replies))
    texts = [f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("say ■ more", "and")]
    assert tokenizer.decode(answer.tokens[~answer.counted]) == "".join(texts)


def test_calls_that_the_template_refuses_end_a_conversation(make_tokenizer, caplog):
    answer = make_conversation(make_tokenizer(), [call(1, 2, 3)], lambda _: [{"role": "tool", "content": "1"}])
    assert answer.counted.all() and np.isnan(answer.reward)
    assert "rows:1: the chat template refuses the conversation" in caplog.text


@pytest.mark.parametrize(("turns", "ended"), [(2, True), (4, False)])
def test_the_environment_knows_when_nothing_more_can_be_said(make_tokenizer, turns, ended):
    known = []

    def reply(episode):
        known.append(episode.is_last)
        return 0.0 if episode.is_last else [{"role": "user", "content": "more"}]

    said = ["a", "b"] if ended else ["a"]
    answer = make_conversation(make_tokenizer(), said, reply, turns=turns, ended=ended)
    assert known == ([False, True] if ended else [True]) and answer.reward == 0.0
