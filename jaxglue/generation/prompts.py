"""Prompts and conversations to answer, tokenized as in training."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxglue.data.limits import template_time_limit
from jaxglue.data.messages import Chat, Messages, Tools
from jaxglue.data.template import ChatTemplate
from jaxglue.data.template_check import TemplateCheck
from jaxglue.data.tokenizer import encode_beginning, require_unicode

_CUT = "\U000f0002"
"""Marks the end of a message's text in a rendering."""


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the tokens that precede the answer to a conversation, as in training: special tokens in it are text.

    Raises:
        ValueError: a missing chat template, one that refuses the conversation, or text that is no Unicode.
    """
    template, text = render_messages(tokenizer, Chat(messages, None, []))
    return template.encode(text)


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    check: bool = False,
    needs_tools: bool = False,
    variables: Mapping[str, Any] | None = None,
    answers: bool = True,
    continues: bool = False,
) -> tuple[ChatTemplate, str]:
    """Return the template, and the text before the answer to a conversation, which it encodes.

    Args:
        tokenizer: of the model.
        chat: the conversation.
        check: refuse what training refuses.
        needs_tools: with `check`, refuse tools that the template leaves out.
        variables: further ones for the template, such as `enable_thinking`.
        answers: begin a turn of the assistant's after the last message.
        continues: end inside of the last message, which is the assistant's, for an answer that goes on with it.

    Raises:
        ValueError: as `encode_messages`; a last message that cannot be continued.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: use --raw to continue the text verbatim")
    template = ChatTemplate(tokenizer)
    with template_time_limit():
        messages, tools = template.protect(chat.messages, chat.tools)
        if continues:
            text = _render_opened(template, messages, tools, variables)
        elif answers:
            text = template.render_prompt(messages, tools, variables)
        else:
            text = template.render(messages, tools, variables)
        if check:
            TemplateCheck(template, needs_tools=needs_tools)(messages, tools, text)
    require_unicode(text)
    return template, text


def _render_opened(
    template: ChatTemplate, messages: Messages, tools: Tools, variables: Mapping[str, Any] | None
) -> str:
    """Return a conversation up to the end of its last message's text, without what the template puts behind it."""
    *earlier, last = messages
    is_text = isinstance(last["content"], str)
    *parts, end = [{"text": last["content"]}] if is_text else last["content"]
    if last["role"] != "assistant" or last.get("tool_calls") or not end.get("text"):
        raise ValueError("only an assistant's text can be continued: end the messages with one")
    end = end | {"text": end["text"] + _CUT}
    text = template.render([*earlier, last | {"content": end["text"] if is_text else [*parts, end]}], tools, variables)
    before, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise ValueError("the chat template leaves out the end of the last message, which cannot be continued")
    return before


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Return the tokens that precede an answer, as in training.

    Args:
        tokenizer: of the model, with a chat template unless `raw`.
        prompt: the user's message.
        system: the system message before it.
        raw: encode the text verbatim, with the tokenizer's special prefix.

    Raises:
        ValueError: a missing chat template, one that refuses the conversation, or text that is no Unicode.
    """
    if raw:
        require_unicode(prompt)
        return encode_beginning(tokenizer, prompt)
    return encode_messages(tokenizer, [*system_message(system), {"role": "user", "content": prompt}])


def system_message(text: str | None) -> list[dict[str, str]]:
    """Return the messages that begin a conversation: the system's, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]
