"""Requests of this machine's own programs, told from those of web pages that a browser sends here."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""


def foreign_page(headers: Mapping[str, str], origins: Sequence[str] = (), *, any_host: bool = False) -> str | None:
    """Return why a request may be a web page's that is not let in; None for others.

    Pages reach servers of this machine by names of their own that lead here, and send the name as `Host`.

    Args:
        headers: of the request.
        origins: whose pages are let in, `*` for all; by default those of this machine's names.
        any_host: answer to every name, for pages of every origin unless some are named: the request has a key.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not any_host and _name(f"//{host}") not in LOOPBACK:
        return f"the host {host!r:.100} is not this machine's own name: use {LOOPBACK[0]}"
    if origin is None or "*" in origins or origin in origins:
        return None
    if origins or (not any_host and _name(origin) not in LOOPBACK):
        return f"pages of {origin!r:.100} may not ask this server: --allowed-origins names those that may"
    return None


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
