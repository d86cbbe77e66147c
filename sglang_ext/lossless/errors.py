"""Why a check could not be made."""

from __future__ import annotations


class CannotTest(RuntimeError):
    """The run ends with exit code 2: nothing can be said. Form: field, expected, found, remedy."""

    def __init__(self, field: str, *, expected: str, found: object, remedy: str) -> None:
        super().__init__(f"{field}: expected {expected}, found {found}. {remedy}")
        self.field = field


class RefusedRequest(RuntimeError):
    """The server answered a request with a status that says it will not serve it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message
