"""Ask by LlamaIndex: completions, chats and streams."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

options = {"api_base": f"{sys.argv[1]}/v1", "api_key": "any", "model": "tiny", "max_tokens": 12, "temperature": 0.0}
for is_chat in (True, False):
    model = OpenAILike(**options, is_chat_model=is_chat, context_window=1024)
    whole = model.complete("What is 3 plus 4?").text
    assert whole and "".join(piece.delta or "" for piece in model.stream_complete("What is 3 plus 4?")) == whole
chat = OpenAILike(**options, is_chat_model=True).chat([ChatMessage(role="user", content="Hello")])
assert chat.message.content
print("answered")
