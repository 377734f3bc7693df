"""Row formats: detection, the texts, the chat or the answers of a row, and columns that a format does not use."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxglue.data.config import NO_COLUMNS, Columns
from jaxglue.data.files import Row
from jaxglue.data.messages import WEIGHTS, Chat, Clip, Video, content_texts, listed, number_of, read_chat, read_flag
from jaxglue.files.json_file import parse_json

if TYPE_CHECKING:
    from jaxglue.data.images import ImageRules

KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "alpaca_chat": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "segments": ("segments",),
    "text": ("text",),
}
"""Required keys by format, in order of detection."""
CHATS = ("messages", "conversations", "question_answer", "alpaca_chat")
"""Formats that are rendered with the chat template."""
PLAIN = {"text", "alpaca", "segments", "texts"}
"""Formats that no chat template renders."""
WHOLE_CHATS = ("messages", "conversations")
"""Formats of whole conversations, without a prompt apart."""
ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca."""
_UNREAD = {
    "chat_template_kwargs": "write these settings into the template, and name it with --chat-template",
    "functions": "name them 'tools'",
}
"""Remedies by keys of other programs' chats that change the conversation, and are not read."""
IMAGE_COLUMNS = ("images", "image")
"""Keys of a row's images."""
AUDIO_COLUMNS = ("audios", "audio")
"""Keys of a row's clips of audio."""
VIDEO_COLUMNS = ("videos", "video")
"""Keys of a row's videos: a list of them, and a single one."""
_IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Ends of names in Hugging Face's imagefolder, whose rows are an image's `file_name` and its text."""
MEDIA_COLUMNS = (*IMAGE_COLUMNS, *AUDIO_COLUMNS, *VIDEO_COLUMNS)
"""Keys of what models that see, and hear, read beside a row's texts."""


class Segments(NamedTuple):
    """Texts that follow each other as they are, each trained on or not."""

    texts: list[str]
    trained: list[bool]


Text = Chat | list[str]
"""A conversation, or the strings of a prompt and its answer."""
AnswerTexts = tuple[Text | None, Text | None]
"""(preferred, other); None where a row with a label has one answer."""
PAIRS = "preference"
"""Format of rows of two answers."""
ANSWER_KEYS: dict[str, tuple[str, ...]] = {PAIRS: ("chosen", "rejected"), "labeled": ("label",)}
"""Required keys by format, in order of detection."""
LABELS = "labels"
"""Column with 1 or 0 for each of a document's labels."""
PAIR_COLUMNS: Columns = {"margin": 0.0}
"""Columns that every store of pairs holds: least differences of the answers' scores."""
_TURN = re.compile(r"\n\n(Human|Assistant):[ \n]?")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_REQUIRED = KEYS | ANSWER_KEYS
_TRAINED = (*WEIGHTS, "train_detail")
_CHAT = ("system", "tools")
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "messages": _CHAT,
    "conversations": _CHAT,
    "prompt_completion": _CHAT,
    "alpaca": ("input", "history", "system"),
    "alpaca_chat": ("input", "history", "system"),
    "question_answer": ("system",),
    PAIRS: ("prompt", "margin", "instruction", "input", *_CHAT),
    "labeled": ("messages", "prompt", "completion", *_CHAT),
}
"""Keys that a format uses beside its required ones."""
_TAGGED = ("kto_tag", "conversations", "instruction", "input", "output")
"""Keys that LLaMA-Factory's rows with `kto_tag` have beside those of rows with a label."""
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def detect_format(row: Mapping[str, Any]) -> str:
    """Detect a row's format from its keys, first from those with values.

    Raises:
        ValueError: no format matches; lists the row's keys and the known formats.
    """
    for present in ({key for key, value in row.items() if value is not None}, row.keys()):
        if name := next((name for name, keys in KEYS.items() if present >= set(keys)), None):
            return name
    known = "; ".join(f"{name}: {' and '.join(keys)}" for name, keys in KEYS.items())
    hint = "rename keys with --columns, such as prompt=question,completion=answer"
    if "chosen" in row and "rejected" in row:
        hint = "rows of two answers need an --objective that compares them, such as dpo"
    if "questions" in row and "state" in row:
        hint = "rows of questions about a state need --objective decide"
    if "positive" in row or "documents" in row:
        hint = "rows of texts need --objective embed, and of documents to a query --objective rerank"
    raise ValueError(
        f"unknown row format: the keys are {listed(row)}; known formats and their keys are {known}; {hint}"
    )


def read_row(row: Mapping[str, Any], format: str, images: "ImageRules | None" = None) -> Text | Segments:
    """Return the chat of a row, its segments, or its strings: a prompt, if any, and a text to train on.

    Args:
        row: as read.
        format: of the row.
        images: of a model that sees; None refuses images.

    Raises:
        ValueError: a missing key, a value of the wrong type, or a setting that is not read.
    """
    if missing := [key for key in KEYS[format] if key not in row]:
        raise ValueError(f"a row of format {format!r} needs {listed(missing)}; its keys are {listed(row)}")
    if format == "segments":
        refuse_media(row)
        return _segments(row["segments"])
    if format == "text" and str(row.get("file_name", "")).lower().endswith(_IMAGE_FILES):
        raise ValueError(
            f"'file_name' is an image, {row['file_name']!r:.80}, and its text would be trained on without it: write "
            "'question', 'answer' and 'images', or leave out the key"
        )
    if images is None:
        if format != "text":
            refuse_media(row)
        return with_system(_read_content(row, format), row)
    media = row_media(row)
    chat_format = "alpaca_chat" if format == "alpaca" and media else format
    return with_system(images.attach(_read_content(row, chat_format, sees=True), media), row)


def _segments(value: Any) -> Segments:
    """Read axolotl's `input_output`: a list of {"text": …, "label": true where it is trained on}."""
    if not isinstance(value, list) or not all(
        isinstance(each, Mapping) and {"text", "label"} <= each.keys() for each in value
    ):
        raise ValueError('\'segments\' must be a list of {"text": …, "label": …}')
    for each in value:
        _strings(each, "text")
    return Segments([each["text"] for each in value], [read_flag(each["label"], "label") for each in value])


def refuse_media(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with images, videos or sounds."""
    if medium := next((key for key in MEDIA_COLUMNS if row.get(key) not in _EMPTY), None):
        raise ValueError(f"{medium!r} is not read, as only text is: leave out such rows, or the key")


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a row."""
    return _listed(row, IMAGE_COLUMNS)


def row_media(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a row, then its clips of audio, as `Clip`, and its videos, as `Video`."""
    several, one = VIDEO_COLUMNS
    videos = _listed(row, (several,)) or ([row[one]] if row.get(one) not in _EMPTY else [])  # one is a list of frames
    return [*row_images(row), *map(Clip, _listed(row, AUDIO_COLUMNS)), *map(Video, videos)]


def _listed(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    """Return the list of the first column that has a value."""
    value: Any = next((row[key] for key in columns if row.get(key) not in _EMPTY), [])
    if isinstance(value, str) and value.lstrip().startswith("["):  # of a table
        value = parse_json(value, columns[0])
    return value if isinstance(value, list) else [value]


def with_system(content: Chat | list[str], row: Mapping[str, Any]) -> Chat | list[str]:
    """Begin a chat that has no system message with its row's `system` text.

    Raises:
        ValueError: a text for a prompt that is no chat, or other settings that are not read.
    """
    text = "" if row.get("system") is None else row["system"]
    if not isinstance(text, str):
        raise ValueError(f"'system' must be a string, got {type(text).__name__}")
    if not isinstance(content, Chat):
        if text and len(content) > 1:
            raise ValueError("'system' has a text, and the prompt is no chat: write the row as 'messages'")
        return content
    if unread := next((key for key in _UNREAD if row.get(key)), None):
        raise ValueError(f"{unread!r} is not read: {_UNREAD[unread]}")
    return content.with_system(text) if text else content


def _read_content(row: Mapping[str, Any], format: str, *, sees: bool = False) -> Chat | list[str]:
    match format:
        case "messages" | "conversations":
            return read_chat(row[format], row.get("tools"), format, sees=sees)
        case "prompt_completion" if isinstance(row["prompt"], list):
            return _completed_chat(row, sees=sees)
        case "question_answer":
            return _exchange(*_strings(row, "question", "answer"))
        case "alpaca":
            instruction, given, output = _alpaca(row)
            return [alpaca_prompt(instruction, given), output]
        case "alpaca_chat":
            instruction, given, output = _alpaca(row)
            return _exchange(_asked(instruction, given), output)
    return _strings(row, *KEYS[format])


def alpaca_prompt(instruction: str, given: str) -> str:
    """Return the prompt of Stanford Alpaca for an instruction and its input, which may be empty."""
    context = ", paired with an input that provides further context" if given else ""
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(instruction=instruction, context=context, input=section)


def _asked(instruction: str, given: str) -> str:
    """Return the user's message of an instruction and its input, which may be empty, as LLaMA-Factory joins them."""
    return f"{instruction}\n{given}" if given else instruction


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    """Return instruction, input and output."""
    if row.get("history"):
        raise ValueError("the Alpaca format has no 'history': write such rows as 'messages'")
    given = "" if row.get("input") is None else row["input"]
    return _strings({**row, "input": given}, "instruction", "input", "output")


def _completed_chat(row: Mapping[str, Any], *, sees: bool = False) -> Chat:
    """Join TRL's lists of prompt and completion messages; only the completion's are trained on."""
    prompt = read_chat(row["prompt"], row.get("tools"), "prompt", sees=sees)
    completion = read_chat(row["completion"], None, "completion", sees=sees)
    trained = [False if message["role"] == "assistant" else None for message in prompt.messages]
    messages, images = prompt.messages + completion.messages, prompt.images + completion.images
    return Chat(messages, prompt.tools, [*trained, *completion.trained], images)


def _exchange(question: str, answer: str) -> Chat:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(messages, None, [None, None])


def _strings(row: Mapping[str, Any], *keys: str) -> list[str]:
    for key in keys:
        if not isinstance(row[key], str):
            raise ValueError(f"{key!r} must be a string, got {type(row[key]).__name__}; chats go under 'messages'")
    return [row[key] for key in keys]


def detect_preference(row: Mapping[str, Any]) -> str:
    """Detect the format of a row of preference data from its keys.

    Raises:
        ValueError: neither two answers nor a label.
    """
    row = _with_label(row)
    for name, keys in ANSWER_KEYS.items():
        if all(key in row for key in keys):
            return name
    raise ValueError(
        f"preference data need the keys 'chosen' and 'rejected', with 'prompt' or as whole conversations, or 'label' "
        f"with 'prompt' and 'completion'; the keys are {listed(row)}; rename keys with --columns, such as "
        "chosen=winner,rejected=loser"
    )


def read_answers(row: Mapping[str, Any], format: str, images: "ImageRules | None" = None) -> AnswerTexts:
    """Return the answers of a row, each with its prompt, in which its images are; without `images` these are refused.

    Raises:
        ValueError: a missing key, a value of the wrong type, answers that are empty or equal, or conversations that do
            not begin alike.
    """
    row = _with_label(row)
    if missing := [key for key in ANSWER_KEYS[format] if key not in row]:
        raise ValueError(f"a row of format {format!r} needs {listed(missing)}; its keys are {listed(row)}")
    if images is None:
        refuse_media(row)
    sees = images is not None
    answers = _pair(row, sees=sees) if format == PAIRS else _labeled_answer(row, sees=sees)
    if images is not None:
        media = row_media(row)
        answers = answers[0] and images.attach(answers[0], media), answers[1] and images.attach(answers[1], media)
    first, second = answers
    return first and with_system(first, row), second and with_system(second, row)


def _with_label(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with LLaMA-Factory's `kto_tag` as one with a label and with messages."""
    if "kto_tag" not in row or "label" in row:
        return row
    if row.get("instruction") is None:
        return {**row, "label": row["kto_tag"], "messages": row.get("messages", row.get("conversations"))}
    instruction, given, output = _alpaca(row)
    chat = _exchange(_asked(instruction, given), output)
    return {**row, "label": row["kto_tag"], "messages": chat.messages}


def read_numbers(row: Mapping[str, Any], columns: Columns) -> list[float]:
    """Return a row's values of columns, `absent` without one, NaN for anything but a number.

    `labels.2` is the third value of the list `labels`, which tables have as JSON.

    Raises:
        ValueError: `labels` with more or fewer values than columns of them.
    """
    counts = Counter(column for name in columns if (column := name.rpartition(".")[0]))
    lists = {column: dict(enumerate(values)) for column in counts if (values := _list_of(row, column)) is not None}
    if LABELS in lists and (found := len(lists[LABELS])) != counts[LABELS]:
        raise ValueError(f"{LABELS!r} has {found} values, expected {counts[LABELS]}, one for each of --num-labels")
    numbers = []
    for name, absent in columns.items():
        column, _, place = name.rpartition(".")
        value = lists[column].get(int(place)) if column in lists else row.get(name)
        numbers.append(absent if value in (None, "") else number_of(value))
    return numbers


def _list_of(row: Mapping[str, Any], column: str) -> list[Any] | None:
    """Return the list of a column; None for anything else."""
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, column)
    return value if isinstance(value, list) else None


def _pair(row: Mapping[str, Any], *, sees: bool) -> AnswerTexts:
    if absent := next((name for name in ("chosen", "rejected") if row[name] is None), None):
        raise ValueError(f"{absent!r} is null: remove the row")
    if row["chosen"] == row["rejected"]:
        raise ValueError("'chosen' and 'rejected' are equal, so the row says nothing: remove it")
    prompt, chosen, rejected = row.get("prompt"), _conversation(row["chosen"]), _conversation(row["rejected"])
    if prompt is None and isinstance(row.get("instruction"), str):  # LLaMA-Factory's rows in Alpaca's form
        instruction, given, _ = _alpaca({**row, "output": ""})
        prompt = [{"role": "user", "content": _asked(instruction, given)}]
        chosen, rejected = (
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in (chosen, rejected)
        )
    if prompt is None and isinstance(row["chosen"], Mapping):  # LLaMA-Factory's and axolotl's rows
        prompt = row.get("conversations", row.get("messages"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            raise ValueError(
                "'chosen' and 'rejected' are strings: give their 'prompt' too, such as with --columns prompt=question, "
                "or whole conversations"
            )
        return _continued(prompt, chosen, "chosen", row), _continued(prompt, rejected, "rejected", row)
    if isinstance(chosen, str) or isinstance(rejected, str):
        kinds = f"{type(row['chosen']).__name__} and {type(row['rejected']).__name__}"
        raise ValueError(f"'chosen' and 'rejected' must both be strings or both lists of messages, got {kinds}")
    if prompt is None or isinstance(prompt, str):
        return _divided(chosen, rejected, row.get("tools"), prompt, sees=sees)
    options: dict[str, Any] = {"row": row, "sees": sees}
    return _continued(prompt, chosen, "chosen", **options), _continued(prompt, rejected, "rejected", **options)


def _labeled_answer(row: Mapping[str, Any], *, sees: bool) -> AnswerTexts:
    label = read_flag(row["label"], "label")
    if "messages" in row:
        messages = read_chat(row["messages"], row.get("tools"), "messages", sees=sees)
        answer: Text = _with_prompt(messages, len(messages.messages) - 1, "messages")
    elif "prompt" in row and "completion" in row:
        answer = _continued(row["prompt"], row["completion"], "completion", row, sees=sees)
    else:
        raise ValueError(
            f"a row with 'label' needs 'prompt' and 'completion', or 'messages'; its keys are {listed(row)}"
        )
    return (answer, None) if label else (None, answer)


def _conversation(value: Any) -> Any:
    """Return the messages of a transcript in Anthropic's form, or of one message; other values unchanged."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return [value] if isinstance(value, Mapping) else value
    _, *parts = _TURN.split(value)
    return [{"role": _ROLES[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _continued(prompt: Any, answer: Any, name: str, row: Mapping[str, Any], *, sees: bool = False) -> Text:
    """Return a prompt with its answer: two strings, or two lists of messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        for key, text in (("prompt", prompt), (name, answer)):
            if not text:
                raise ValueError(f"{key!r} is empty: remove the row")
        return [prompt, answer]
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise ValueError(
            f"'prompt' and {name!r} must both be strings or both lists of messages, got {type(prompt).__name__} and "
            f"{type(answer).__name__}"
        )
    before = read_chat(prompt, row.get("tools"), "prompt", sees=sees)
    after = read_chat(answer, None, name)  # whose images no other answer would see
    messages, trained = before.messages + after.messages, before.trained + after.trained
    return _with_prompt(Chat(messages, before.tools, trained, before.images), len(prompt), name)


def _divided(chosen: Any, rejected: Any, tools: Any, prompt: Any, *, sees: bool) -> AnswerTexts:
    """Return two conversations, whose common first messages are the prompt; a string `prompt` repeats one of them."""
    chats = read_chat(chosen, tools, "chosen", sees=sees), read_chat(rejected, tools, "rejected", sees=sees)
    if chats[0].images != chats[1].images:
        raise ValueError("'chosen' and 'rejected' have other images: give both the same")
    pairs = zip(*(chat.messages for chat in chats), strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chat.messages) for chat in chats))
    if not shared:
        raise ValueError("'chosen' and 'rejected' do not begin with the same message, so they answer no common prompt")
    texts = [text for message in chats[0].messages[:shared] for text in content_texts(message["content"])]
    if isinstance(prompt, str) and not any(prompt.strip() in text for text in texts):
        raise ValueError("'prompt' is in no message that 'chosen' and 'rejected' begin with: leave it out")
    return _with_prompt(chats[0], shared, "chosen"), _with_prompt(chats[1], shared, "rejected")


def _with_prompt(chat: Chat, prompt: int, name: str) -> Chat:
    """Return the chat with its first `prompt` messages not trained on, and the others checked."""
    answer = chat.messages[prompt:]
    if not answer or answer[0]["role"] != "assistant":
        found = f"a {answer[0]['role']!r} message" if answer else "nothing"
        raise ValueError(f"{name!r}: expected an assistant's answer after the prompt, got {found}")
    if not any(
        any(map(str.strip, content_texts(message["content"]))) or message.get("tool_calls")
        for message in answer
        if message["role"] == "assistant"
    ):
        raise ValueError(f"{name!r}: the answer is empty: remove the row")
    flags = [False if message["role"] == "assistant" else None for message in chat.messages[:prompt]]
    return chat._replace(trained=flags + chat.trained[prompt:])


def unused_columns(rows: Iterable[Row], format: str, columns: Columns = NO_COLUMNS) -> list[str]:
    """Return the columns with values that neither the format nor the objective uses, in order of appearance."""
    found: dict[str, None] = {}
    for row in rows:
        used = {*_used(row.value, format), *(name.partition(".")[0] for name in columns), *found}
        found |= dict.fromkeys(key for key, value in row.value.items() if key not in used and value not in _EMPTY)
    return list(found)


def unused_note(source: object, format: str, columns: list[str]) -> str:
    """Describe the columns of a source that its format does not use."""
    return f"{source}: columns that the format {format} does not use: {listed(columns)}"


def _used(row: Mapping[str, Any], format: str) -> Iterable[str]:
    first_turns = format == PAIRS and row.get("prompt") is None and isinstance(row.get("chosen"), Mapping)
    beside = ("conversations", "messages") if first_turns else ()
    tagged = _TAGGED if format == "labeled" and "kto_tag" in row else ()
    return (*_REQUIRED[format], *_OPTIONAL.get(format, ()), *_TRAINED, *beside, *tagged)
