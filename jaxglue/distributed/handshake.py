"""Mutual proof of a shared secret: each end signs the other's fresh challenge, so nothing replayable travels."""

import hmac
import json
import re
import secrets
from dataclasses import asdict, astuple, dataclass
from typing import Any

from jaxglue.distributed.frames import Connection, FrameError

OTHER_TOKEN = "has another token (JAXGLUE_TOKEN or --token), or is no process of this run"
"""The reason given for an end that does not prove the secret."""
_OTHER_FORM = "introduces itself in another form"
_HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Hello:
    """A process as it introduces itself."""

    index: int
    count: int
    host: str


def challenge_peer(peer: Connection, token: bytes, deadline: float) -> Hello:
    """Let a new connection prove the token to process 0, and prove it in return; return who it is.

    Raises:
        FrameError: it is late, malformed, or has another token.
    """
    challenge = secrets.token_hex(32)
    peer.send({"challenge": challenge})
    message = peer.receive(deadline)
    hello, answer = _read_hello(message), _hex(message, "challenge")
    if not hmac.compare_digest(_hex(message, "proof"), _proof(token, "join", challenge, answer, *astuple(hello))):
        raise FrameError(OTHER_TOKEN)
    peer.send({"proof": _proof(token, "meet", challenge, answer)})
    peer.admit()
    return hello


def prove(peer: Connection, token: bytes, hello: Hello, deadline: float) -> None:
    """Prove the token to process 0, which must prove it too.

    Raises:
        FrameError: the other end is late, malformed, or has another token.
    """
    challenge, answer = _hex(peer.receive(deadline), "challenge"), secrets.token_hex(32)
    proof = _proof(token, "join", challenge, answer, *astuple(hello))
    peer.send({**asdict(hello), "challenge": answer, "proof": proof})
    try:
        received = _hex(peer.receive(deadline), "proof")
    except FrameError:  # process 0 drops what does not convince it
        raise FrameError(OTHER_TOKEN) from None
    if not hmac.compare_digest(received, _proof(token, "meet", challenge, answer)):
        raise FrameError(OTHER_TOKEN)
    peer.admit()


def _proof(token: bytes, *signed: Any) -> str:
    return hmac.digest(token, json.dumps(signed).encode(), "sha256").hex()


def _read_hello(message: dict[str, Any]) -> Hello:
    hello = Hello(message.get("index"), message.get("count"), message.get("host"))  # type: ignore[arg-type]
    if not (_is_number(hello.index) and _is_number(hello.count) and isinstance(hello.host, str)):
        raise FrameError(_OTHER_FORM)
    return hello


def _is_number(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _hex(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not (isinstance(value, str) and _HEX.fullmatch(value)):
        raise FrameError(_OTHER_FORM)
    return value
