"""DFLASH: one pass over the block, each row's best token. (arXiv:2602.06036)

Drafts are deterministic, so q is one-hot and verification samples the target alone. With DFlash
2's selector a walk over each row's candidates picks the tokens, and q is kept where it is drawn.
"""

from __future__ import annotations

from torch import Tensor

from sglang_ext.core.spec.types import Proposal
from sglang_ext.srt.spec.acceptance import SamplingLaws
from sglang_ext.srt.spec.draft_sampling import draft_sampling
from sglang_ext.srt.spec.live import LiveBatch
from sglang_ext.srt.spec.worker_base import BlockSpecWorker


class DFlashWorker(BlockSpecWorker):
    """Worker behind `--speculative-algorithm DFLASH`."""

    algorithm = "DFLASH"

    def propose(self, live: LiveBatch, laws: SamplingLaws) -> Proposal:
        hidden = self.draft.hidden(live)
        logits = self.draft.model.base_logits(hidden.reshape(-1, hidden.shape[-1]))
        selector = self.draft.model.candidate_selector
        if selector is None:
            return Proposal(self._best(logits).view(len(live), self.gamma))
        values, ids = selector.candidates(logits.view(len(live), self.gamma, -1))
        sampling = draft_sampling(live, laws, self.gamma, ids, self.generator)
        return selector.walk(values, ids, hidden, live.anchors, sampling)

    def _best(self, logits: Tensor) -> Tensor:
        """[rows, draft_vocab] -> [rows] target ids."""
        tokens = logits.max(dim=-1).indices
        ids = self.draft.model.target_columns
        return tokens if ids is None else ids[tokens]
