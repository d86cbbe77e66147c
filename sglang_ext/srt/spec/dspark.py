"""DSPARK: DFlash's block, a serial Markov head over it, and a scheduler for what to verify.

(arXiv:2607.05147.) The scheduler sees confidences that were computed from the previous token of
each position, speeds measured at start-up, and times of past rounds: nothing that depends on the
token it decides about.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_spec

from sglang_ext.core.spec.markov import propose
from sglang_ext.core.spec.sps import load_table
from sglang_ext.core.spec.types import Proposal, VerifyPlan, VerifyResult
from sglang_ext.srt.spec.acceptance import SamplingLaws
from sglang_ext.srt.spec.checkpoint import local_folder
from sglang_ext.srt.spec.confidence_log import ConfidenceLog, confidence_log
from sglang_ext.srt.spec.draft_sampling import draft_sampling
from sglang_ext.srt.spec.live import LiveBatch
from sglang_ext.srt.spec.pacing import Pacer, load_sts
from sglang_ext.srt.spec.speed import grid_for
from sglang_ext.srt.spec.worker_base import BlockSpecWorker


class DSparkWorker(BlockSpecWorker):
    """Worker behind `--speculative-algorithm DSPARK`."""

    algorithm = "DSPARK"
    log: ConfidenceLog | None = None

    def build_pacer(self) -> Pacer:
        spec = get_spec()
        table = spec.speculative_dspark_sps_table_path
        folder = local_folder(spec.speculative_draft_model_path)
        sts = load_sts(spec.speculative_dspark_confidence_sts_path, folder, self.gamma)
        self.log = confidence_log(
            self.gamma,
            has_head=self.draft.model.confidence_head is not None,
            writes=self.tp_group.rank_in_group == 0,
        )
        return Pacer(self.gamma, grid_for(self), None if table is None else load_table(table), sts)

    def propose(self, live: LiveBatch, laws: SamplingLaws) -> Proposal:
        model = self.draft.model
        hidden = self.draft.hidden(live)
        logits = model.base_logits(hidden.reshape(-1, hidden.shape[-1]))
        wanted = self.pacer.uses_confidence or self.log is not None
        proposal = propose(
            model.markov_head,
            logits.view(len(live), self.gamma, -1),
            hidden,
            live.anchors,
            sampling=draft_sampling(live, laws, self.gamma, model.target_columns, self.generator),
            confidence=model.confidence_head if wanted else None,
            target_ids=model.target_columns,
        )
        self._confidence = proposal.confidence
        return proposal

    def _account(
        self, keys: list[str], drafting: list[int], plan: VerifyPlan, result: VerifyResult
    ) -> None:
        super()._account(keys, drafting, plan, result)
        if self.log is not None and drafting and self._confidence is not None:
            accepted = result.accepted.tolist()
            verified = [plan.counts[r] for r in drafting]
            self.log.write(self._confidence, verified, [accepted[r] for r in drafting])
