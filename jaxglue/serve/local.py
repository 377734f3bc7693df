"""Requests of this machine's own programs, told from those of web pages that a browser sends here."""

from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""


def foreign_page(headers: Mapping[str, str]) -> str | None:
    """Return why a request may be a web page's: another host's name, or an origin elsewhere; None for others.

    Pages reach servers of this machine by names of their own that lead here, and send the name as `Host`.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if _name(f"//{host}") not in LOOPBACK:
        return f"the host {host!r:.100} is not this machine's own name: use {LOOPBACK[0]}"
    if origin is not None and _name(origin) not in LOOPBACK:
        return f"pages of {origin!r:.100} may not ask this server"
    return None


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
