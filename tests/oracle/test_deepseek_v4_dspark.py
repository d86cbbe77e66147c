"""The DSpark draft inside a DeepSeek-V4 checkpoint against one written naively.

The target's rank is real; its pool holds the context latents of the stages. Nothing of the package
is used on the other side: every stage is one forward over the context and the block, no cache.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from sglang_ext.srt.models import deepseek_v4_dspark
from sglang_ext.srt.models.deepseek_v4_dspark import DeepseekV4DSparkDraft
from sglang_ext.srt.spec.bundled import TARGET_CONFIG
from sglang_ext.tiny_model.deepseek_v4 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle import v4
from tests.oracle.v4_mtp import NaiveModule

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
# Shorter than the window of 16, as long, longer.
CONTEXTS = (1, 15, 16, 40)


def naive_logits(
    tensors: dict[str, Tensor], raw: dict[str, Any], features: Tensor, anchor: int, rows: int
) -> Tensor:
    """[rows, V] before the Markov bias; features [context, captured * D] of the target."""
    stages = range(len(raw["compress_ratios"]) - raw["num_hidden_layers"])
    modules = [NaiveModule(tensors, raw, stage) for stage in stages]
    first, count, window = modules[0], len(features), raw["sliding_window"]
    context = first.norm(features @ first.w["main_proj.weight"].T, "main_norm")
    ids = [anchor] + [raw["dspark_noise_token_id"]] * (rows - 1)
    x = torch.stack([tensors["embed.weight"][ids]] * raw["hc_mult"], dim=1)
    for module in modules:
        before = module.keys(context)[-window:]

        def attend(y: Tensor, module: NaiveModule = module, before: Tensor = before) -> Tensor:
            y = module.norm(y, "attn_norm")
            seen = torch.cat((before, module.keys(y, count)))
            return module.read(y, count, [seen] * rows)

        def experts(y: Tensor, module: NaiveModule = module) -> Tensor:
            return module.experts(module.norm(y, "ffn_norm"))

        x = module.around(module.around(x, "hc_attn", attend), "hc_ffn", experts)
    return modules[-1].logits(x)


def loaded(world: ModelWorld, tensors: dict[str, Tensor], raw: dict[str, Any]) -> Any:
    draft = DeepseekV4DSparkDraft(SimpleNamespace(**{TARGET_CONFIG: raw}))
    draft.load_weights(tensors.items())
    for module in draft.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    draft.attach_target(world.model.model.embed, world.model.lm_head, 2048)
    return draft


@torch.inference_mode()
def our_logits(
    world: ModelWorld, draft: Any, features: list[Tensor], anchors: list[int], rows: int, noise: int
) -> Tensor:
    """[requests, rows, V] of a batch of requests with contexts of unequal lengths."""
    runner = world.runner
    table, slots = world._place(anchors, max(map(len, features)) + rows)
    prefix = torch.tensor([len(f) for f in features])
    for own, given in zip(slots, features, strict=True):
        places = torch.arange(len(given))
        draft.write_context(given, places, own[: len(given)], runner.token_to_kv_pool)
    ids = torch.tensor([[anchor] + [noise] * (rows - 1) for anchor in anchors]).flatten()
    positions = (prefix[:, None] + torch.arange(rows)).flatten()
    batch = world._batch(
        ForwardMode.TARGET_VERIFY, table, input_ids=ids, positions=positions, seq_lens=prefix,
        out_cache_loc=torch.zeros_like(ids),
    )  # fmt: skip
    with forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch):
        hidden = draft(ids, positions, batch).hidden_states
    return draft.base_logits(hidden).view(len(anchors), rows, -1)


def test_block_equals_a_naive_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every row; then with two faults, which are seen."""
    path = write(tmp_path, seed=4, mixing=1.0, layers=4, with_dspark=True)
    tensors = load_file(path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    width = len(raw["dspark_target_layer_ids"]) * raw["hidden_size"]
    generator, rng = torch.Generator().manual_seed(1), random.Random(1)
    features = [torch.randn(n, width, generator=generator) for n in CONTEXTS]
    anchors = [rng.randrange(256) for _ in CONTEXTS]
    noise = raw["dspark_noise_token_id"]
    with model_world(path, "float32") as world:
        draft = loaded(world, tensors, raw)

        def worst(rows: int) -> float:
            ours = our_logits(world, draft, features, anchors, rows, noise)
            pairs = zip(ours, features, anchors, strict=True)
            return max(
                float((found - naive_logits(tensors, raw, given, anchor, rows)).abs().max())
                for found, given, anchor in pairs
            )

        for rows in (1, 2, 5, 8):
            assert worst(rows) < TOLERANCE
        last = "mtp.2."
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
                     "confidence_head.proj.weight"):  # fmt: skip
            assert torch.equal(draft.last.get_parameter(name), tensors[last + name])
        real = deepseek_v4_dspark.Visible.of

        def one_less(forward_batch: Any, rows: int, window: int) -> Any:
            return real(forward_batch, rows, window - 1)

        monkeypatch.setattr(deepseek_v4_dspark.Visible, "of", one_less)
        assert worst(5) > 10 * TOLERANCE
        monkeypatch.undo()
        draft.rotation.frequency.mul_(1.01)
        assert worst(5) > 10 * TOLERANCE


def test_features_are_means_of_layer_outputs(tmp_path: Path) -> None:
    """HF's streams behind each captured layer, the last one included."""
    path = write(tmp_path, seed=4, mixing=1.0, layers=4, with_dspark=True)
    captured, prompt = [1, 2, 3], random.Random(2).choices(range(256), k=37)
    hf, outputs = v4.load_hf(path), {}
    for i in captured:
        layer = hf.model.layers[i]
        layer.register_forward_hook(lambda _, __, out, i=i: outputs.__setitem__(i, out))
    v4.hf_logits(hf, prompt)
    streams = (out[0] if isinstance(out, tuple) else out for out in outputs.values())
    expected = torch.cat([x[0].mean(dim=1) for x in streams], dim=-1)
    with model_world(path, "float32") as world:
        world.model.set_dspark_layers_to_capture(captured)
        found = world.run([prompt], [1])[1]
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
