"""Ask by OpenAI's client: chats, streams, tools, responses and models."""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any")
(model,) = client.models.list()
assert model.id == "tiny" and model.created > 1.7e9
ask = {"model": "tiny", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 12, "seed": 1}
whole = client.chat.completions.create(**ask)
streamed = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
pieces = list(streamed)
text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
assert text == whole.choices[0].message.content and pieces[-1].usage.completion_tokens == 12
prefix = [*ask["messages"], {"role": "assistant", "content": "It is"}]
state = {"continue_final_message": True, "add_generation_prompt": False}
assert client.chat.completions.create(**ask | {"messages": prefix}, extra_body=state).usage.completion_tokens == 12
assert client.completions.create(model="tiny", prompt="a", max_tokens=4, echo=True, logprobs=1).choices[0].logprobs
assert client.responses.create(model="tiny", input="Hello", max_output_tokens=8).usage.output_tokens == 8
try:
    client.chat.completions.create(**ask | {"model": "gpt-5"})
except openai.NotFoundError as error:
    assert "use one of tiny" in str(error)
print("answered")
