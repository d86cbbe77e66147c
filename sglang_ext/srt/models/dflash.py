"""DFlash and DFlash 2 drafts."""

from __future__ import annotations

from typing import Any

from sglang_ext.core.spec.selector import CandidateSelector
from sglang_ext.srt.models.draft_backbone import DraftBackbone


class DFlashDraft(DraftBackbone):
    """The shared backbone, with DFlash 2's candidate selector where the checkpoint has one."""

    algorithm = "DFLASH"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.candidate_selector = None
        if self.draft.selector_rank:
            self.candidate_selector = CandidateSelector(
                vocab_size=self.draft.vocab_size,
                rank=self.draft.selector_rank,
                hidden_size=self.draft.hidden_size,
                top_k=self.draft.selector_top_k,
            )


EntryClass = DFlashDraft
