"""DeepSeek-V4 for SGLang on any device.

The residual is `hc_mult` streams per token. A layer:

    streams --hc_pre--> x --norm--> attention --hc_post--> streams
    streams --hc_pre--> x --norm--> experts   --hc_post--> streams
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import LazyValue
from torch import Tensor, nn

from sglang_ext.kernels.hyper_connection import HcMix, hc_head, hc_post, hc_pre
from sglang_ext.srt.models.deepseek_v4_attention import Rotation, SharedLatentAttention, Turn
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.models.deepseek_v4_halves import run_halves
from sglang_ext.srt.models.deepseek_v4_load import load
from sglang_ext.srt.models.deepseek_v4_moe import MoE
from sglang_ext.srt.models.deepseek_v4_names import required_tensors
from sglang_ext.srt.models.deepseek_v4_setup import read
from sglang_ext.srt.models.norms import rms_norm


class DecoderLayer(nn.Module):
    """One block of the target, or one stage of the bundled draft."""

    def __init__(
        self, config: DeepseekV4Config, layer_id: int, ratio: int, prefix: str, *, hashed: bool
    ) -> None:
        super().__init__()
        hidden, n = config.hidden_size, config.hc_mult
        self.config = config
        self.attn = SharedLatentAttention(config, layer_id, ratio, f"{prefix}.attn")
        self.ffn = MoE(config, layer_id, f"{prefix}.ffn", hashed=hashed)
        self.attn_norm = rms_norm(hidden, eps=config.rms_norm_eps)
        self.ffn_norm = rms_norm(hidden, eps=config.rms_norm_eps)
        for part in ("hc_attn", "hc_ffn"):
            self.register_parameter(f"{part}_fn", wide(n * (2 + n), n * hidden))
            self.register_parameter(f"{part}_base", wide(n * (2 + n)))
            self.register_parameter(f"{part}_scale", wide(3))

    def forward(
        self,
        streams: Tensor,
        turn: Turn,
        positions: Tensor,
        input_ids: Tensor,
        forward_batch: Any,
    ) -> Tensor:
        """streams [tokens, n, hidden] -> the same shape."""
        mix = self.hc_pre("hc_attn", streams)
        y = self.attn(self.attn_norm(mix.x), turn, positions, forward_batch)
        streams = hc_post(y, streams, mix.post, mix.comb)
        mix = self.hc_pre("hc_ffn", streams)
        y = self.ffn(self.ffn_norm(mix.x), input_ids, forward_batch)
        return hc_post(y, streams, mix.post, mix.comb)

    def hc_pre(self, part: str, streams: Tensor) -> HcMix:
        """What the sublayer behind `part` reads of streams [tokens, n, hidden], and its mix."""
        config = self.config
        return hc_pre(
            streams,
            *(getattr(self, f"{part}_{name}") for name in ("fn", "base", "scale")),
            iters=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            rms_eps=config.rms_norm_eps,
        )


class Decoder(nn.Module):
    """Embedding, layers, and the streams brought back to one normalised hidden state."""

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.embed = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            use_attn_tp_group=is_dp_attention_enabled(),
            prefix=f"{prefix}.embed",
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, ratio, f"{prefix}.layers.{i}", hashed=config.is_hash(i))
            for i, ratio in enumerate(config.compress_ratios)
        )
        n, hidden = config.hc_mult, config.hidden_size
        self.hc_head_fn, self.hc_head_base = wide(n, n * hidden), wide(n)
        self.hc_head_scale = wide(1)
        self.norm = rms_norm(hidden, eps=config.rms_norm_eps)
        self.plain = Rotation(config, compressed=False)
        self.stretched = Rotation(config, compressed=True)
        self.layers_to_capture: frozenset[int] = frozenset()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        """[rows, hidden] after the final norm, and what a draft reads.

        That is the features where layers are captured, the streams [rows, n * hidden] for a module.
        SGLang calls this under context parallelism, with its rank's rows, and gathers what comes
        back.
        """
        hidden, captured, streams = self.run(input_ids, positions, forward_batch, input_embeds)
        if self.layers_to_capture:
            return hidden, captured
        handed = handed_on(streams, forward_batch)
        return hidden if handed is None else (hidden, handed)

    def run(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, embeds: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """[rows, hidden] after the final norm, features of the captured layers, the streams."""
        config = self.config
        x = self.embed(input_ids) if embeds is None else embeds
        streams = x.unsqueeze(1).repeat(1, config.hc_mult, 1)
        captured: list[Tensor] = []
        if forward_batch.can_run_tbo:
            streams, captured = run_halves(self, streams, forward_batch)
        else:
            turns = self.turns(positions)
            for layer_id, layer in enumerate(self.layers):
                turn = turns[bool(config.compress_ratios[layer_id])]
                with get_global_expert_distribution_recorder().with_current_layer(layer_id):
                    streams = layer(streams, turn, positions, input_ids, forward_batch)
                self.capture(layer_id, streams, captured)
        weights = (self.hc_head_fn, self.hc_head_base, self.hc_head_scale)
        x = hc_head(streams, *weights, eps=config.hc_eps, rms_eps=config.rms_norm_eps)
        return self.norm(x), captured, streams

    def turns(self, positions: Tensor) -> dict[bool, Turn]:
        """The rotations of rows at `positions` [tokens], by whether a layer has entries."""
        kinds = {bool(ratio) for ratio in self.config.compress_ratios}
        return {k: Turn.of(self.stretched if k else self.plain, positions) for k in kinds}

    def capture(self, layer_id: int, streams: Tensor, into: list[Tensor]) -> None:
        """Keep the layer's feature where a draft reads it."""
        if layer_id in self.layers_to_capture:
            into.append(feature(streams))


class DeepseekV4ForCausalLM(nn.Module):
    """Entry that SGLang constructs, loads and calls."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                f"--quantization: expected unset with DeepSeek-V4 on this package, found "
                f"{quant_config.get_name()}. fp8 and fp4 checkpoints are widened at load."
            )
        self.config = config
        self.facts = read(config)
        self.model = Decoder(self.facts, f"{prefix}.model" if prefix else "model")
        self.lm_head = ParallelLMHead(
            self.facts.vocab_size,
            self.facts.hidden_size,
            use_attn_tp_group=get_parallel().enable_dp_lm_head,
            prefix=f"{prefix}.lm_head" if prefix else "lm_head",
        )
        self.logits_processor = LogitsProcessor(config)
        self.pp_group = get_parallel().pp_group
        self._loaded = False
        # Read by SGLang when it rebalances experts.
        self.routed_experts_weights_of_layer = LazyValue(self._routed_weights)

    def _routed_weights(self) -> dict[int, list[Tensor]]:
        layers: Any = self.model.layers
        return {i: layer.ffn.routed_weights() for i, layer in enumerate(layers)}

    @property
    def start_layer(self) -> int:
        return 0

    @property
    def end_layer(self) -> int:
        return self.facts.num_hidden_layers

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation:
        facts = read(config)
        return ModelConfigForExpertLocation(
            num_layers=facts.num_hidden_layers,
            num_logical_experts=facts.n_routed_experts,
            num_groups=None,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        return self.model.embed.weight, self.lm_head.weight

    @property
    def capture_aux_hidden_states(self) -> bool:
        return bool(self.model.layers_to_capture)

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        """Collect, for a draft, the mean over the streams of the OUTPUT of these layers.

        Raises:
            ValueError: a layer that is not there.
        """
        unknown = [i for i in layer_ids if not 0 <= i < self.facts.num_hidden_layers]
        if unknown:
            raise ValueError(
                f"target layer ids: expected 0 to {self.facts.num_hidden_layers - 1}, found "
                f"{unknown}. The draft was made for another target."
            )
        self.model.layers_to_capture = frozenset(layer_ids)

    set_dspark_layers_to_capture = set_dflash_layers_to_capture

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        model = self.model
        hidden, captured, streams = model.run(input_ids, positions, forward_batch, input_embeds)
        handed = handed_on(streams, forward_batch)
        return self.logits_processor(
            input_ids, hidden, self.lm_head, forward_batch, captured or None, handed
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole checkpoint; later calls may replace some of the weights.

        Raises:
            DeepseekV4TensorError: anything missing, surplus or misshaped.
        """
        load(self, self.facts, weights, required_tensors(self.facts), partial=self._loaded)
        self._loaded = True


def handed_on(streams: Tensor, forward_batch: Any) -> Tensor | None:
    """[rows, n * hidden] that the MTP module goes on from; None where no module drafts."""
    # A forward that is only timed names no algorithm.
    algorithm = forward_batch.spec_algorithm
    return streams.flatten(1) if algorithm is not None and algorithm.is_eagle() else None


def feature(streams: Tensor) -> Tensor:
    """[tokens, n, hidden] -> [tokens, hidden], what a draft reads of a layer's output."""
    return streams.float().mean(dim=1).to(streams.dtype)


def wide(*shape: int) -> nn.Parameter:
    """A float32 parameter whatever the model's dtype."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)
