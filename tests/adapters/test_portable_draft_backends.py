"""SGLang's draft backend factory, offered `portable`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.srt.attention import draft_backends, portable
from sglang_ext.srt.attention.slot_backend import SlotChainBackend
from sglang_ext.srt.models.claim import Claim
from sglang_ext.srt.models.deepseek_v4_setup import MODULE


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


def runner_of(*architectures: str) -> Any:
    config = SimpleNamespace(architectures=architectures)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config))


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(portable, "PortableAttnBackend", FakeBackend)
    monkeypatch.setattr(portable, "PortableMultiStepDraftBackend", FakeBackend)
    monkeypatch.setattr(Claim, "backend_class", FakeBackend)
    runner = runner_of("AnyForCausalLMNextN")
    return SimpleNamespace(draft_model_runner=runner, topk=3, speculative_num_steps=5)


@pytest.mark.parametrize(("stamps", "sizes"), [(True, (3, 5)), (False, ())])
def test_portable_is_offered(factory: Any, stamps: bool, sizes: tuple[int, ...]) -> None:
    table: dict[str, Any] = {}
    name, backend = draft_backends.create_backend(
        choose("portable"), factory, "decode_attention_backend", table, "no {backend_type}", stamps
    )
    assert (name, backend.runner, backend.sizes) == ("portable", factory.draft_model_runner, sizes)
    assert table == {}


def test_a_claimed_draft_gets_its_own_kind(factory: Any) -> None:
    factory.draft_model_runner = runner_of(MODULE.architecture)
    chosen = (choose("portable"), factory, "decode_attention_backend", {}, "no {backend_type}")
    _, steps = draft_backends.create_backend(*chosen, True)
    assert isinstance(steps, SlotChainBackend)
    assert len(steps.attn_backends) == 4
    _, extend = draft_backends.create_backend(*chosen, False)
    assert isinstance(extend, FakeBackend)


def test_other_names_go_through(factory: Any) -> None:
    table = {"triton": lambda: ("triton", "theirs")}
    found = draft_backends.create_backend(choose("triton"), factory, "any", table, "no")
    assert found == ("triton", "theirs")
