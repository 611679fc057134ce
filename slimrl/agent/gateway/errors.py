"""What the gateway refuses, as each API says it: a status, a code that clients know, and a reason."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails


class ApiError(Exception):
    """An answer of the gateway that is no turn of the policy.

    Args:
        status: of HTTP.
        code: of OpenAI's API, such as `context_length_exceeded`.
        retry: whether the client may send the request again.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry = status, message, code, retry


class BudgetSpent(ApiError):
    """The trajectory has no turns or tokens left for the request, and is truncated."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(400, message, code=code)


def refused(message: str, code: str | None = None) -> ApiError:
    """A request that no policy can answer."""
    return ApiError(400, message, code=code)


def refused_body(error: ValidationError) -> ApiError:
    """A body with fields that are missing, or of another form."""
    problems = error.errors(include_url=False, include_input=False)
    if unknown := [_unknown_kind(one) for one in problems if one["type"] == "union_tag_invalid"]:
        # The other problems say of each form that the value might have had that it has another.
        return refused("; ".join(unknown[:3]))
    said = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in problems]
    return refused("; ".join(said[:3]))


def _unknown_kind(problem: ErrorDetails) -> str:
    """What is wrong with an object whose `type` or `role` is none that the API has here."""
    path = ".".join(str(one) for one in problem["loc"] if "[" not in str(one))
    told = problem["ctx"]
    key = told["discriminator"].strip("'")
    return f"{path}: {key} {told['tag']!r} is not supported; {told['expected_tags']} are"


OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 502: "server_error"}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large", 502: "api_error"}
REFUSED = "invalid_request_error"


def openai_error(error: ApiError) -> dict[str, object]:
    """The body of an error in OpenAI's form."""
    kind = OPENAI_TYPES.get(error.status, REFUSED)
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, object]:
    """The body of an error in Anthropic's form."""
    kind = ANTHROPIC_TYPES.get(error.status, REFUSED)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
