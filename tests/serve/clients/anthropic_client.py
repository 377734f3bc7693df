"""Ask by Anthropic's client: whole and as a stream, tokens counted."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any")
messages = [{"role": "user", "content": "What is 3 plus 4?"}]
ask = {"model": "tiny", "max_tokens": 12, "messages": messages, "system": "Be brief."}
ask["extra_body"] = {"temperature": 0.0}
message = client.messages.create(**ask)
assert message.usage.output_tokens == 12 and message.stop_reason == "max_tokens"
with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
    assert text == message.content[0].text, (text, message)
    assert stream.get_final_message().usage.output_tokens == 12
counted = client.messages.count_tokens(model="tiny", messages=messages, system="Be brief.")
assert counted.input_tokens == message.usage.input_tokens
tool = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "additionalProperties": False},
}
called = client.messages.create(**ask | {"max_tokens": 200}, tools=[tool], tool_choice={"type": "any"})
assert called.stop_reason in ("tool_use", "max_tokens")
try:
    client.messages.create(**ask | {"model": "claude"})
except anthropic.NotFoundError as error:
    assert "use one of tiny" in str(error)
print("answered")
