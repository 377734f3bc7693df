"""Conversations with an environment, without a model."""

import numpy as np
import pytest

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

    replies = iter([{"role": "user", "content": "six?"}, 0.5])
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
