"""DeepSeek-V3.2 for SGLang on any device: latent attention with an indexer, grouped MoE.

Stages hand over through SGLang's layer boundaries, which place the reductions of every parallel
layout; experts run in SGLang's MoE layer. The multi-token-prediction layer is not part of the
target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.batch_overlap.two_batch_overlap import model_forward_stages
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layer_boundary import (
    append_stages,
    declare_attn,
    declare_ffn,
    is_dense_ffn_fully_dp,
)
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import make_pp_layers
from sglang.srt.utils.common import LazyValue
from torch import Tensor, nn

from sglang_ext.srt.models.deepseek_v32_attention import LatentAttention, rope_tables
from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config
from sglang_ext.srt.models.deepseek_v32_halves import layer_strategy
from sglang_ext.srt.models.deepseek_v32_load import load
from sglang_ext.srt.models.deepseek_v32_moe import DenseMLP, MoE
from sglang_ext.srt.models.deepseek_v32_setup import read
from sglang_ext.srt.models.norms import rms_norm
from sglang_ext.srt.parallel.two_batch import features_of_halves


class DecoderLayer(nn.Module):
    """Norm, attention, norm, dense MLP or MoE, with the residual kept by SGLang's boundaries."""

    def __init__(self, config: DeepseekV32Config, layer_id: int, prefix: str) -> None:
        super().__init__()
        self.layer_id = layer_id
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention, ffn = self.stages(config, layer_id)
        self.self_attn = LatentAttention(config, layer_id, f"{prefix}.self_attn")
        self.mlp: nn.Module
        if config.is_moe(layer_id):
            self.mlp = MoE(config, layer_id, f"{prefix}.mlp")
        else:
            group = "replicated" if is_dense_ffn_fully_dp() else "tp"
            self.mlp = DenseMLP(hidden, config.intermediate_size, f"{prefix}.mlp", group)
        self.input_layernorm = rms_norm(hidden, eps=eps)
        self.post_attention_layernorm = rms_norm(hidden, eps=eps)
        self.attn_boundary, self.ffn_boundary = append_stages(
            (attention, self.input_layernorm), (ffn, self.post_attention_layernorm)
        )

    @staticmethod
    def stages(config: DeepseekV32Config, layer_id: int) -> tuple[Any, Any]:
        """What the layer declares to its neighbours."""
        ffn = declare_ffn(
            sparse=config.is_moe(layer_id), next_layer_sparse=config.is_moe(layer_id + 1)
        )
        return declare_attn(), ffn

    def in_halves(self, forward_mode: Any) -> Any:
        """The layer's operations under two-batch overlap (patches/two_batch_models.py)."""
        return layer_strategy(self, forward_mode)

    def forward(
        self, x: Any, cos: Tensor, sin: Tensor, forward_batch: Any, captured: Any = None
    ) -> Any:
        """x: the stream as the previous layer left it; `captured` collects its complete value."""
        x = self.attn_boundary.prepare(x, forward_batch, capture_gathered=captured)
        if x.shape[0]:
            x = self.self_attn(x, cos, sin, forward_batch)
        x = self.attn_boundary.finish(x, forward_batch)
        x = self.ffn_boundary.prepare(x, forward_batch)
        return self.ffn_boundary.finish(self.mlp(x), forward_batch)


class Decoder(nn.Module):
    """Embedding, layers of this pipeline stage, final norm."""

    def __init__(self, config: DeepseekV32Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.pp_group = get_parallel().pp_group
        self.embed_tokens: nn.Module = PPMissingLayer()
        if self.pp_group.is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                use_attn_tp_group=is_dp_attention_enabled(),
                prefix=f"{prefix}.embed_tokens",
            )
        self.layers, self.start_layer, self.end_layer = make_pp_layers(
            config.num_hidden_layers,
            lambda idx, prefix: DecoderLayer(config, idx, prefix),
            prefix=f"{prefix}.layers",
            stage_facts=lambda idx: DecoderLayer.stages(config, idx),
        )
        self.norm: nn.Module = PPMissingLayer(return_tuple=True)
        if self.pp_group.is_last_rank:
            self.norm = rms_norm(config.hidden_size, eps=config.rms_norm_eps)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.layers_to_capture: frozenset[int] = frozenset()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """[rows, hidden] after the final norm, or what the next stage gets.

        With layers to capture, the last stage returns their inputs beside it. Under context
        parallelism SGLang calls this with its rank's rows, and gathers what comes back.
        """
        if self.pp_group.is_first_rank:
            x = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
            residual_batch.start(forward_batch)
        else:
            first: Any = self.layers[self.start_layer]
            x = first.attn_boundary.from_pp(pp_proxy_tensors, forward_batch)
        tables: Any = (self.cos, self.sin)
        cos, sin = (table[positions] for table in tables)
        captured = AuxHiddenStateList()
        for layer_id in range(self.start_layer, self.end_layer):
            if forward_batch.can_run_tbo and self.config.is_moe(layer_id):
                x = self._run_halves(layer_id, x, positions, forward_batch)
                captured += features_of_halves(forward_batch)
                break
            into = captured if layer_id in self.layers_to_capture else None
            with get_global_expert_distribution_recorder().with_current_layer(layer_id):
                x = self.layers[layer_id](x, cos, sin, forward_batch, into)
        if not self.pp_group.is_last_rank:
            return residual_batch.to_pp(x, forward_batch)
        last = captured.capture if self.config.num_hidden_layers in self.layers_to_capture else None
        x = residual_batch.final_norm(x, forward_batch, self.norm, last, skip_empty=True)
        return (x, captured) if self.layers_to_capture else x

    def _run_halves(self, first: int, x: Any, positions: Tensor, batch: Any) -> Any:
        """The layers from `first` on, all of them mixtures, over both halves of the batch."""
        for child in batch.tbo_children:
            tables: Any = (self.cos, self.sin)
            child.rotation = tuple(table[child.positions] for table in tables)
            child.layers_to_capture = self.layers_to_capture
        layers = self.layers[first : self.end_layer]
        return model_forward_stages(
            layers, enable_tbo=True, positions=positions, forward_batch=batch, hidden_states=x
        )


class DeepseekV32ForCausalLM(nn.Module):
    """Entry that SGLang constructs, loads and calls."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                f"--quantization: expected unset with DeepSeek-V3.2 on this package, found "
                f"{quant_config.get_name()}. fp8 checkpoints are widened while they are loaded."
            )
        self.config = config
        self.facts = read(config)
        self.pp_group = get_parallel().pp_group
        self.model = Decoder(self.facts, f"{prefix}.model" if prefix else "model")
        self.lm_head = ParallelLMHead(
            self.facts.vocab_size,
            self.facts.hidden_size,
            use_attn_tp_group=get_parallel().enable_dp_lm_head,
            prefix=f"{prefix}.lm_head" if prefix else "lm_head",
        )
        self.logits_processor = LogitsProcessor(config)
        self._loaded = False
        # Read by SGLang when it rebalances experts.
        self.routed_experts_weights_of_layer = LazyValue(self._routed_weights)

    @property
    def start_layer(self) -> int:
        return self.model.start_layer

    @property
    def end_layer(self) -> int:
        return self.model.end_layer

    def _routed_weights(self) -> dict[int, list[Tensor]]:
        weights = {}
        for layer_id in range(self.start_layer, self.end_layer):
            layer: Any = self.model.layers[layer_id]
            if isinstance(layer.mlp, MoE):
                weights[layer_id] = layer.mlp.routed_weights()
        return weights

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation:
        facts = read(config)
        return ModelConfigForExpertLocation(
            num_layers=facts.num_hidden_layers,
            num_logical_experts=facts.n_routed_experts,
            num_groups=facts.n_group,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        embed: Any = self.model.embed_tokens
        return embed.weight, self.lm_head.weight

    @property
    def capture_aux_hidden_states(self) -> bool:
        return bool(self.model.layers_to_capture)

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        """Collect the output of these layers for a draft: the input of the layer behind each."""
        self.model.layers_to_capture = frozenset(layer_id + 1 for layer_id in layer_ids)

    set_dspark_layers_to_capture = set_dflash_layers_to_capture

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        out = self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if not self.pp_group.is_last_rank:
            return out
        hidden, captured = out if self.capture_aux_hidden_states else (out, None)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, captured)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a whole checkpoint; later calls may replace some of the weights.

        Raises:
            DeepseekV32TensorError: anything missing, surplus or misshaped.
        """
        load(
            self,
            self.facts,
            weights,
            keep=lambda layer: self.start_layer <= layer < self.end_layer,
            partial=self._loaded,
        )
        self._loaded = True
