"""Ask by verifiers' training client: token ids and log-probabilities of a chat that it renders itself."""

import asyncio
import sys

from verifiers.v1 import SamplingConfig, TrainClientConfig, resolve_client
from verifiers.v1.dialects.chat import ChatDialect


async def main() -> None:
    config = TrainClientConfig(base_url=f"{sys.argv[1]}/v1", renderer_model_name=sys.argv[2])
    client, sampling = resolve_client(config), SamplingConfig(max_tokens=6, temperature=1.0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
    response = await client.get_response(ChatDialect(), body, sampling)
    tokens = response.tokens
    assert tokens is not None and tokens.prompt_ids and 0 < len(tokens.completion_ids) <= 6
    assert len(tokens.completion_logprobs) == len(tokens.completion_ids) and max(tokens.completion_logprobs) <= 0
    await client.close()


asyncio.run(main())
print("answered")
