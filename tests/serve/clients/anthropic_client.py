"""Ask by Anthropic's client: whole and as a stream, tokens counted."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any")
messages = [{"role": "user", "content": "What is 3 plus 4?"}]
ask = {"model": "tiny", "max_tokens": 12, "messages": messages, "temperature": 0.0, "system": "Be brief."}
message = client.messages.create(**ask)
assert message.usage.output_tokens == 12 and message.stop_reason == "max_tokens"
with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
    assert text == message.content[0].text, (text, message)
    assert stream.get_final_message().usage.output_tokens == 12
counted = client.messages.count_tokens(model="tiny", messages=messages, system="Be brief.")
assert counted.input_tokens == message.usage.input_tokens
print("answered")
