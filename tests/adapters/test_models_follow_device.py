"""DeepSeek-V3.2 and V4 on a device that is not the CPU: no tensor is made on the wrong side.

Not a GPU: the device is pretended (pretend_device.py), and ops run in torch. What it shows is that
loader, model, pool and attention backend make every tensor where the others are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import Tensor

from sglang_ext.srt.models.claims import claim_of
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.adapters.model_world import ModelWorld, model_world
from tests.adapters.pretend_device import DEVICE, MixedDevicesError, Remote, remote, sent
from tests.oracle.v32 import Sequences
from tests.tiny import save_tokenizer

WRITERS = {"v32": deepseek_v32.write, "v4": deepseek_v4.write}
# Longer than top_k and than a block of 128, and a prefix that is read again.
LENGTHS, CHUNK, STEPS, DRAFTS = (140, 9), 131, 1, 3


def _remote_batch(batch: Any) -> Any:
    """The batch as a GPU's scheduler hands it over: copies on the host end in `_cpu`."""
    for holder in (batch, batch.spec_info):
        for name, value in vars(holder).items() if holder is not None else ():
            if isinstance(value, Tensor) and not name.endswith("_cpu"):
                setattr(holder, name, sent(value))
    return batch


class RemoteWorld(ModelWorld):
    """The runner of another world with model, pools and backend on the pretended device."""

    def __init__(self, world: ModelWorld, path: Path) -> None:
        super().__init__(world.runner)
        runner = world.runner
        config = runner.model_config.hf_config
        claim = claim_of(config)
        assert claim is not None
        with set_default_torch_dtype(torch.float32), torch.device(DEVICE):
            self.model = claim.model_class(config)
        assert all(isinstance(p, Remote) for p in self.model.parameters())
        self.model.shared_experts_config = runner.model.shared_experts_config
        self.model.load_weights(load_file(path / "model.safetensors").items())
        pool = runner.token_to_kv_pool
        self.pool = claim.pool_class(config)(
            size=pool.size,
            page_size=pool.page_size,
            dtype=torch.float32,
            layer_num=pool.layer_num,
            device=str(DEVICE),
            enable_memory_saver=False,
        )
        self.stand_in = SimpleNamespace(
            device=str(DEVICE),
            req_to_token_pool=SimpleNamespace(),
            token_to_kv_pool=self.pool,
            kv_index_translator=None,
        )
        self.backend = claim.backend_class(self.stand_in)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _forward(self, batch: Any) -> list[Tensor]:
        table = self.runner.req_to_token_pool.req_to_token
        self.backend.req_to_token_pool = SimpleNamespace(req_to_token=sent(table))
        batch = _remote_batch(batch)
        kept = self.runner.model, self.runner.attn_backend
        self.runner.model, self.runner.attn_backend = self.model, self.backend
        try:
            logits = super()._forward(batch)[0]
        finally:
            self.runner.model, self.runner.attn_backend = kept
        assert isinstance(logits, Remote)
        return [logits.here]


def _played(world: ModelWorld) -> list[Tensor]:
    """Prefill in two pieces, decode steps and a verification; the logits of each forward."""
    rng = random.Random(0)
    torch.manual_seed(0)
    sequences = [rng.choices(range(256), k=n + STEPS + DRAFTS) for n in LENGTHS]
    play, everyone = Sequences(world, sequences), range(len(sequences))
    out = [play.extend({r: min(n, CHUNK) for r, n in enumerate(LENGTHS)})]
    out.append(play.extend({r: n - CHUNK for r, n in enumerate(LENGTHS) if n > CHUNK}))
    out += [play.decode(everyone) for _ in range(STEPS)]
    out.append(play.verify(dict.fromkeys(everyone, DRAFTS), commit=dict.fromkeys(everyone, 1)))
    return [logits for forward in out for logits in forward.values()]


@pytest.fixture(autouse=True)
def _batches_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's runner would copy them into buffers of its own, on the real device."""
    monkeypatch.setenv("SGLANG_EAGER_INPUT_NO_COPY", "1")


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("device") / request.param
    WRITERS[request.param](path, seed=3, index_topk=16)
    save_tokenizer(path)
    return path


@contextmanager
def _remote_world(path: Path) -> Iterator[tuple[ModelWorld, RemoteWorld]]:
    with model_world(path, "float32") as world, remote():
        yield world, RemoteWorld(world, path)


def test_every_tensor_follows_the_device(checkpoint: Path) -> None:
    with _remote_world(checkpoint) as (local, elsewhere):
        found, expected = _played(elsewhere), _played(local)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_an_op_on_both_sides_is_seen() -> None:
    """The instrument itself: what a GPU refuses raises, what it allows does not."""
    with remote():
        x = torch.zeros(3, 4, device=DEVICE)
        x[:, 1] = torch.tensor(2.0)
        x.copy_(x.cpu() + torch.ones(3, 4))
        assert x[torch.tensor([0], device=DEVICE)].tolist() == [[1.0, 3.0, 1.0, 1.0]]
        for fault in (
            lambda: x + torch.ones(4),
            lambda: x[torch.tensor([0])],
            lambda: torch.cat((x, torch.ones(1, 4))),
            lambda: torch.where(x > 0, torch.arange(4), -1),
        ):
            with pytest.raises(MixedDevicesError):
                fault()
