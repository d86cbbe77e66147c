"""Server-sent events of SGLang's streaming answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_FIELD = b"data: "
_END = b"[DONE]"


def events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON object of every event in a byte stream.

    Lines end at a newline only: text may hold other characters that `str.splitlines` (and so
    httpx's `iter_lines`) takes for the end of a line.
    """
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            payload = line.strip().removeprefix(_FIELD)
            if line.startswith(_FIELD) and payload != _END:
                yield json.loads(payload)
