"""Refusals of requests: why one gets no answer, with HTTP's status, and errors in OpenAI's form."""

from typing import Any

from starlette.responses import JSONResponse

from jaxglue.serve.service import EndedError, FullError, TooLongError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class BadRequestError(Exception):
    """A request that is refused, with HTTP's status, and OpenAI's code and parameter, if there are any."""

    def __init__(self, message: str, status: int = 400, *, code: str | None = None, parameter: str | None = None):
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter


def refusal_of(error: Exception) -> BadRequestError:
    """Return the refusal that an error of the service, or of reading a request, stands for."""
    match error:
        case BadRequestError():
            return error
        case EndedError():
            return BadRequestError(str(error), 500)
        case FullError():
            return BadRequestError("too many requests wait: try again later", 429, code="rate_limit_exceeded")
        case TooLongError():
            return BadRequestError(str(error), code="context_length_exceeded")
        case _:
            return BadRequestError(str(error))


def readable(text: str) -> str:
    """Return a text as UTF-8 can write it: it may quote half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


def openai_body(refusal: BadRequestError) -> dict[str, Any]:
    """Return a refusal as OpenAI's clients read it."""
    kind = _TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    parameter = None if refusal.parameter is None else readable(refusal.parameter)
    error = {"message": readable(str(refusal)), "type": kind, "param": parameter, "code": refusal.code}
    return {"error": error}


def openai_error(refusal: BadRequestError) -> JSONResponse:
    """Return the response of a refusal in OpenAI's form."""
    return JSONResponse(openai_body(refusal), refusal.status)
