"""Streaming events survive any chunking and any character."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.demo.events import events


@given(st.lists(st.text(), max_size=5), st.integers(1, 7))
def test_every_text_comes_back_whole(texts: list[str], size: int) -> None:
    lines = [f"data: {json.dumps({'text': t}, ensure_ascii=False)}\n\n" for t in texts]
    stream = ("".join(lines) + "data: [DONE]\n\n").encode("utf-8", "surrogatepass")
    chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [event["text"] for event in events(chunks)] == texts
