"""What a user did wrong, in one form: field, expected, found, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from sglang_ext.inputs import InputError


class ConfigError(InputError):
    """A name, file or field of a launch or a plan cannot be used.

    field: what is wrong; where: the file or command it was read from; remedy: what to do
    """

    def __init__(
        self, where: str, field: str, *, expected: str, found: object, remedy: str
    ) -> None:
        super().__init__(f"{where}, {field}", expected=expected, found=repr(found), remedy=remedy)
        self.where, self.field, self.remedy = where, field, remedy


def nearest(name: str, known: Iterable[str]) -> str:
    """ "Did you mean ...?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else ""
