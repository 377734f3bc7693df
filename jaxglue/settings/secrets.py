"""Secrets, masked wherever settings are written or sent."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIALS?)$|(^|_)(KEY|PASS|PAT)$|._PWD$", re.IGNORECASE
)
_SHORTEST = 8
"""Characters of the shortest secret: shorter values of such variables are switches."""
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,}"
    r"|(?<=://)[^/@\s]+(?=@)"
)
"""Tokens of Hugging Face, OpenAI, GitHub, AWS and Slack, and the user part of an address."""


def masked(value: Any, environment: Mapping[str, str]) -> Any:
    """Return nested settings with secrets in their texts replaced by `MASK`.

    Args:
        value: texts, lists and dictionaries.
        environment: the process's variables; values of those named as tokens, keys or passwords are secrets.
    """
    if isinstance(value, dict):
        return {key: masked(item, environment) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, environment) for item in value]
    if not isinstance(value, str):
        return value
    secrets = [text for name, text in environment.items() if _SECRET_NAME.search(name) and len(text) >= _SHORTEST]
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, MASK)
    return _SHAPES.sub(MASK, value)
