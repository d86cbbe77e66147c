"""DeepSeek-V4's MTP module: one more layer, which guesses the token behind the next one.

    embedding of token t+1 --enorm--> e_proj --(every stream)--+
                                                               +--> layer --> streams
    streams behind token t --hnorm--> h_proj --(its own)-------+
    streams --hc_head--> norm --> the target's head: logits of token t+2
Streams of token t are the target's, before its hc_head; further guesses take the module's own in
their place. (Published inference code of DeepSeek-V4, MTPBlock; tensors mtp.0.*.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_ext.kernels.hyper_connection import hc_head
from sglang_ext.srt.models.deepseek_v4 import DecoderLayer, wide
from sglang_ext.srt.models.deepseek_v4_attention import Rotation, Turn
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.models.deepseek_v4_load import load
from sglang_ext.srt.models.deepseek_v4_names import TARGET_NAMES, mtp_tensors
from sglang_ext.srt.models.deepseek_v4_setup import MODULE
from sglang_ext.srt.models.norms import rms_norm


class Module(DecoderLayer):
    """mtp.0: a layer without compressor and without hashing, its entry and its exit."""

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__(config, 0, 0, prefix, hashed=False)
        hidden, n = config.hidden_size, config.hc_mult
        self.enorm = rms_norm(hidden, eps=config.rms_norm_eps)
        self.hnorm = rms_norm(hidden, eps=config.rms_norm_eps)
        self.e_proj = ReplicatedLinear(hidden, hidden, bias=False, prefix=f"{prefix}.e_proj")
        self.h_proj = ReplicatedLinear(hidden, hidden, bias=False, prefix=f"{prefix}.h_proj")
        self.norm = rms_norm(hidden, eps=config.rms_norm_eps)
        self.hc_head_fn, self.hc_head_base = wide(n, n * hidden), wide(n)
        self.hc_head_scale = wide(1)

    def enter(self, embeds: Tensor, streams: Tensor) -> Tensor:
        """embeds [tokens, hidden], streams [tokens, n, hidden] -> [tokens, n, hidden]."""
        told, _ = self.e_proj(self.enorm(embeds))
        carried, _ = self.h_proj(self.hnorm(streams.flatten(0, 1)))
        return told.unsqueeze(1) + carried.view_as(streams)

    def leave(self, streams: Tensor) -> Tensor:
        """streams [tokens, n, hidden] -> [tokens, hidden], normalised."""
        weights = (self.hc_head_fn, self.hc_head_base, self.hc_head_scale)
        eps, rms_eps = self.config.hc_eps, self.config.rms_norm_eps
        return self.norm(hc_head(streams, *weights, eps=eps, rms_eps=rms_eps))


class Modules(nn.Module):
    """Under the names of the checkpoint."""

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.mtp: Any = nn.ModuleList([Module(config, f"{prefix}.mtp.0")])
        self.rotation = Rotation(config, compressed=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[rows, hidden] after the module's norm, and its streams [rows, n * hidden].

        SGLang calls this under context parallelism, with its rank's rows of all arguments, and
        gathers what comes back.
        """
        config, module = self.config, self.mtp[0]
        given = forward_batch.spec_info.hidden_states
        streams = given.view(-1, config.hc_mult, config.hidden_size)
        streams = module.enter(input_embeds, streams)
        turn = Turn.of(self.rotation, positions)
        streams = module(streams, turn, positions, input_ids, forward_batch)
        return module.leave(streams), streams.flatten(1)


class DeepseekV4ForCausalLMNextN(nn.Module):
    """What SGLang's EAGLE worker drafts with under NEXTN."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                f"--speculative-draft-model-quantization: expected unset with DeepSeek-V4 on this "
                f"package, found {quant_config.get_name()}. Weights are widened at load."
            )
        self.config = config
        self.facts: DeepseekV4Config = MODULE.read(config)
        vocab, hidden = self.facts.vocab_size, self.facts.hidden_size
        self.model = Modules(self.facts, f"{prefix}.model" if prefix else "model")
        # Both take the target's weights as soon as there are any.
        self.embed = VocabParallelEmbedding(
            vocab, hidden, use_attn_tp_group=is_dp_attention_enabled(), prefix="embed"
        )
        self.lm_head = ParallelLMHead(vocab, hidden, prefix="lm_head")
        self.logits_processor = LogitsProcessor(config)
        self.pp_group = get_parallel().pp_group
        self._loaded = False

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Share the target's embedding and head, this rank's shards."""
        self.embed.weight, self.lm_head.weight = embed, head

    def set_lm_head_from_target(self, lm_head: nn.Module) -> None:
        """Speak with the target's head itself, whatever has been made of its weight."""
        self.lm_head = lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        """Logits, and the module's streams [tokens, n * hidden] as hidden states.

        input_ids: [tokens], each the token behind the one at its position. forward_batch.spec_info
        carries hidden_states [tokens, n * hidden], the streams of the tokens at `positions`.
        """
        hidden, streams = self.model(input_ids, positions, forward_batch, self.embed(input_ids))
        return self.logits_processor(
            input_ids, hidden, self.lm_head, forward_batch, hidden_states_before_norm=streams
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the module's tensors; the target's, in the same files, are passed over.

        Raises:
            DeepseekV4TensorError: anything missing, surplus or misshaped.
        """
        wanted = mtp_tensors(self.facts)
        load(self, self.facts, weights, wanted, partial=self._loaded, passed=TARGET_NAMES)
        self._loaded = True


EntryClass = DeepseekV4ForCausalLMNextN
