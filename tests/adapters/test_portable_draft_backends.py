"""SGLang's draft backend factory, offered `portable`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.srt.attention import draft_backends, portable


class FakeBackend:
    def __init__(self, runner: Any, *sizes: int) -> None:
        self.runner, self.sizes = runner, sizes


def choose(name: str) -> Any:
    """The factory's own method: look a name up and build it."""

    def original(
        factory: Any, backend_name: str, table: dict[str, Any], error: str, stamps: bool = False
    ) -> Any:
        return table[name]()

    return original


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(portable, "PortableAttnBackend", FakeBackend)
    monkeypatch.setattr(portable, "PortableMultiStepDraftBackend", FakeBackend)
    return SimpleNamespace(draft_model_runner="runner", topk=3, speculative_num_steps=5)


@pytest.mark.parametrize(("stamps", "sizes"), [(True, (3, 5)), (False, ())])
def test_portable_is_offered(factory: Any, stamps: bool, sizes: tuple[int, ...]) -> None:
    table: dict[str, Any] = {}
    name, backend = draft_backends.create_backend(
        choose("portable"), factory, "decode_attention_backend", table, "no {backend_type}", stamps
    )
    assert (name, backend.runner, backend.sizes) == ("portable", "runner", sizes)
    assert table == {}


def test_other_names_go_through(factory: Any) -> None:
    table = {"triton": lambda: ("triton", "theirs")}
    found = draft_backends.create_backend(choose("triton"), factory, "any", table, "no")
    assert found == ("triton", "theirs")
