"""A client of an application at an address of this machine's own, which asks without a key."""

from functools import partial

from starlette import testclient

TestClient = partial(testclient.TestClient, base_url="http://localhost")
