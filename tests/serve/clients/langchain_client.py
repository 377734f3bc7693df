"""Ask by LangChain: whole, as a stream, in a batch, and with a tool bound."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return city


chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", model="tiny", max_tokens=12, temperature=0)
whole = chat.invoke("What is 3 plus 4?")
assert whole.usage_metadata["output_tokens"] == 12
assert "".join(chunk.content for chunk in chat.stream("What is 3 plus 4?")) == whole.content
assert len(chat.batch(["a", "b", "c"])) == 3
called = chat.bind_tools([weather]).bind(max_tokens=200).invoke("Ulm?", tool_choice="required")
assert not called.tool_calls or called.tool_calls[0]["name"] == "weather"
print("answered")
