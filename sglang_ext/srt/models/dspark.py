"""Dense DSpark drafts: the shared backbone, a Markov head and, where shipped, a confidence head."""

from __future__ import annotations

from typing import Any

from torch import nn

from sglang_ext.core.spec.confidence import ConfidenceHead
from sglang_ext.core.spec.markov import build_markov_head
from sglang_ext.srt.models.draft_backbone import DraftBackbone, product_over


class DSparkDraft(DraftBackbone):
    """markov_head.* and confidence_head.* are the checkpoint's own tensor names."""

    algorithm = "DSPARK"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        draft = self.draft
        self.markov_head = build_markov_head(
            draft.markov_head_type,
            vocab_size=draft.vocab_size,
            draft_vocab_size=draft.draft_vocab_size,
            rank=draft.markov_rank,
            hidden_size=draft.hidden_size,
        )
        self.confidence_head = None
        if draft.confidence_head:
            self.confidence_head = ConfidenceHead(
                draft.hidden_size, draft.markov_rank if draft.confidence_with_markov else 0
            )

    def attach_target(self, embed: nn.Module, lm_head: nn.Module, context_length: int) -> None:
        super().attach_target(embed, lm_head, context_length)
        self.markov_head.product = product_over(self.markov_head.markov_w2.weight.data)


EntryClass = DSparkDraft
