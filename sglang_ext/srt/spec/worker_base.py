"""One speculative round for any block drafter: propose, schedule, verify, accept, commit.

SGLang's contract (speculative/base_spec_worker.py): a worker is built with `server_args, gpu_id,
nccl_port, target_worker`, answers `forward_batch_generation(batch, on_publish, grammar_barrier,
pp_proxy_tensors)` for prefill and decode alike, and returns rows of `stride` tokens of which the
first `accept_lens[r]` count. A subclass supplies `propose`, and may supply `build_pacer`; the
draft's model and cache are in `draft_side`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_observability, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from sglang_ext.core.spec.block import verify_ids, verify_positions
from sglang_ext.core.spec.types import Proposal, VerifyPlan, VerifyResult
from sglang_ext.patches import Stage, apply_all
from sglang_ext.srt.spec.acceptance import SamplingLaws, accept
from sglang_ext.srt.spec.draft_side import DraftSide
from sglang_ext.srt.spec.live import LiveBatch
from sglang_ext.srt.spec.logits import adjust, needs_adjustment
from sglang_ext.srt.spec.logprobs import attach_logprobs
from sglang_ext.srt.spec.metrics import RoundMetrics
from sglang_ext.srt.spec.pacing import Pacer, same_on_all_ranks
from sglang_ext.srt.spec.penalties import PenaltyBook, restore_at_prefill
from sglang_ext.srt.spec.ranks import dp_slots, peers_of_request, set_rows
from sglang_ext.srt.spec.seeds import seed_prefill
from sglang_ext.srt.spec.speed import grid_for
from sglang_ext.srt.spec.verify_input import make_verify_input

logger = logging.getLogger(__name__)
_SEED_STRIDE = 1_000_003


class BlockSpecWorker(BaseSpecWorker):
    """Drives a target and a block drafter through prefill and decode rounds."""

    algorithm = ""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        apply_all(portable_cpu=str(self.device).startswith("cpu"), stage=Stage.WORKER)
        # The draft's scope narrows what the context says of the target, so that is read first.
        self.tp_group = get_parallel().tp_group
        self.peers = peers_of_request()
        self.dp_slots = dp_slots()
        self._tp_sync = SpecTpSync(self.peers)
        self.gamma = int(get_spec().speculative_num_draft_tokens) - 1
        self.draft = DraftSide(
            server_args, gpu_id, nccl_port, target_worker, self.algorithm, self.gamma
        )
        self._draft_worker = self.draft.worker
        self.draft_parallel_layout = self.draft.parallel_layout
        self.speculative_num_draft_tokens = self.gamma + 1
        self.speculative_num_steps = 1
        self.penalties = PenaltyBook()
        self.generator = torch.Generator(device="cpu")
        # DP ranks serve other requests: their coins must not be the same ones.
        seed = int(target_worker.random_seed) + get_parallel().attn_dp_rank * _SEED_STRIDE
        self.generator.manual_seed(seed)
        self.metrics = RoundMetrics(
            self.gamma,
            self.algorithm,
            # Counters of several processes are summed; the ranks of a group count the same rounds.
            bool(get_observability().enable_metrics) and self.peers.rank_in_group == 0,
        )
        self.pacer = Pacer(self.gamma, None, None, None)

    def __getattr__(self, name: str) -> Any:
        # SGLang asks a speculative worker for whatever it would ask a plain one.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # What a drafter supplies.

    @abstractmethod
    def propose(self, live: LiveBatch, laws: SamplingLaws) -> Proposal:
        """Draft gamma tokens for every request of `live`."""

    def build_pacer(self) -> Pacer:
        """What decides how much to draft and verify, once the models can run."""
        return Pacer(self.gamma, grid_for(self), None, None)

    # What SGLang calls.

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_idle():
            return self._idle(batch, on_publish)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._round(batch, on_publish, grammar_barrier)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.penalties.forget(rid)
        self.pacer.forget(rid)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        with self.draft.ranks():
            super().alloc_memory_pool(*args, **kwargs)

    def init_attention_backends(self) -> None:
        with self.draft.ranks():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        # The last step of SGLang's start-up: models, pools and backends are in place.
        with self.draft.ranks():
            super().init_cuda_graphs()
        self.pacer = self.build_pacer()

    def get_confidence_budget_prepare(self) -> None:
        return None

    def block_accept_estimate_log_suffix(self) -> str:
        return ""

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        # New target weights reach the draft through what it copied of them (`Follower`); the
        # draft's own stay. A target's tensor names would fit a draft's layers by accident.
        return []

    def dump_info_records(self, *args: Any, **kwargs: Any) -> None:
        return None

    def clear_info_records(self, *args: Any, **kwargs: Any) -> None:
        return None

    def set_dspark_forced_budget_frac(self, *args: Any, **kwargs: Any) -> None:
        return None

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.model_runner.attn_backend, self.draft.runner.attn_backend)

    # Prefill.

    def _prefill(
        self, batch: Any, on_publish: Callable[[Tensor], None] | None
    ) -> GenerationBatchResult:
        """Target prefill, then the draft K/V of every prompt token, before the slots are shared."""
        seed_prefill(batch, self.generator)
        restore_at_prefill(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        features = result.logits_output.hidden_states
        result.logits_output.hidden_states = None
        positions = _extend_positions(batch.prefix_lens, batch.extend_lens, self.device)
        self.draft.write_context(features, positions, plan)
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            self.penalties.begin(req, token)
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=result.new_seq_lens
        )
        return result

    def _idle(
        self, batch: Any, on_publish: Callable[[Tensor], None] | None
    ) -> GenerationBatchResult:
        """No request here, but the target's forward is one for all DP ranks."""
        if batch.is_extend_in_batch:
            self._target_worker.forward_batch_generation(
                batch, capture_hidden_mode=CaptureHiddenMode.FULL
            )
        elif self.dp_slots:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            batch.out_cache_loc = empty
            self._forward_verify(batch, make_verify_input(empty, empty, []), 0)
        return self._idle_result(on_publish)

    def _idle_result(self, on_publish: Callable[[Tensor], None] | None) -> GenerationBatchResult:
        empty = DFlashDraftInputV2.create_idle_input(device=self.device)
        if on_publish is not None:
            on_publish(empty.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=torch.empty(0, dtype=torch.int64, device=self.device),
            accept_lens=torch.empty(0, dtype=torch.int32, device=self.device),
            next_draft_input=empty,
            new_seq_lens=empty.new_seq_lens,
            speculative_num_draft_tokens=self.gamma + 1,
        )

    # One round.

    def _round(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        started = time.perf_counter()
        context = self.model_runner.model_config.context_len
        live = LiveBatch.of(batch, batch.spec_info.bonus_tokens, self.gamma, context)
        laws = SamplingLaws.of(live.reqs, batch.sampling_info)
        keys = [req.rid for req in live.reqs]
        drafts = same_on_all_ranks([int(self.pacer.drafts(keys))], self.peers)[0]
        drafting = live.drafting if drafts else []
        proposal = self._propose(live, laws, drafting)
        plan = self._plan(live, proposal, keys, drafting)
        positions = verify_positions(plan, live.prefix)
        output, kv_plan = self._verify(batch, live, proposal, plan, positions)
        logits = output.next_token_logits
        window = torch.cat((live.anchors[:, None], proposal.tokens), dim=1)
        if needs_adjustment(batch, self.penalties):
            adjust(logits, batch, self.penalties, window, plan, grammar_barrier)
        result = accept(logits, plan, proposal, laws, positions, self.generator)
        self._account(keys, drafting, plan, result)
        self.pacer.timed(
            len(live), plan.total, drafted=bool(drafting), seconds=time.perf_counter() - started
        )
        return self._commit(batch, live, plan, result, output, kv_plan, positions, on_publish)

    def _plan(
        self, live: LiveBatch, proposal: Proposal, keys: list[str], drafting: list[int]
    ) -> VerifyPlan:
        """Admit drafts; every rank admits the same."""
        if not drafting:
            return VerifyPlan.of([0] * len(live), self.device)
        lengths = self.pacer.lengths(keys, proposal, live.caps)
        return VerifyPlan.of(same_on_all_ranks(lengths, self.peers), self.device)

    def _account(
        self, keys: list[str], drafting: list[int], plan: VerifyPlan, result: VerifyResult
    ) -> None:
        """Remember what the round earned, for the gate and for the metrics."""
        if not drafting:
            self.metrics.plain(len(keys))
            return
        accepted = result.accepted.tolist()
        self.pacer.record(keys, [n + 1 for n in accepted], plan.row_counts)
        chosen = set(drafting)
        self.metrics.drafted(plan, [r in chosen for r in range(len(keys))], accepted)

    def _propose(self, live: LiveBatch, laws: SamplingLaws, rows: list[int]) -> Proposal:
        """Draft for the requests in `rows`; the rest keep a placeholder that is never verified."""
        if not rows:
            return Proposal(live.anchors[:, None].expand(-1, self.gamma))
        with self.draft.ranks():
            proposal = self.propose(live.take(rows), laws.take(rows))
        proposal = self._agree(proposal)
        return proposal if len(rows) == len(live) else _spread(proposal, rows, live, self.gamma)

    def _agree(self, proposal: Proposal) -> Proposal:
        """Make every rank verify rank 0's drafts."""
        self._tp_sync.sync(SpecTpSyncSite.DSPARK_DRAFT, proposal.tokens)
        return proposal

    def time_draft(self, live: LiveBatch) -> None:
        """Draft for pretended requests, to be timed."""
        with self.draft.ranks():
            self.propose(live, SamplingLaws.greedy(len(live)))

    def _verify(
        self,
        batch: Any,
        live: LiveBatch,
        proposal: Proposal,
        plan: VerifyPlan,
        positions: Tensor,
    ) -> tuple[Any, Any]:
        """One target pass over the admitted rows: (its output, the plan of what it wrote)."""
        ids = verify_ids(plan, live.anchors, proposal.tokens)
        table = self.model_runner.req_to_token_pool.req_to_token
        slots = live.slots(table, plan.max_length + 1)
        batch.out_cache_loc = slots[plan.row_request, plan.row_offset]
        lengths = torch.tensor(plan.row_counts) + live.prefix_cpu
        kv_plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=live.prefix,
            seq_lens_cpu=live.prefix_cpu,
            write_virtual=batch.out_cache_loc,
            read_extent=plan.max_length + 1,
        )
        verify = make_verify_input(ids, positions, plan.row_counts)
        verify.kv_loc_plan = kv_plan
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, int(lengths.sum())
        return self._forward_verify(batch, verify, plan.total), kv_plan

    def _forward_verify(self, batch: Any, verify: Any, rows: int) -> Any:
        """The target's pass over `rows` rows here and whatever the other DP ranks bring."""
        # Halves are cut after padding, so under two-batch overlap attention is planned then.
        in_halves = batch.tbo_split_seq_index is not None
        forward_batch, _ = verify.prepare_for_verify(
            batch, self._target_worker, defer_metadata_init=in_halves
        )
        set_rows(forward_batch, rows, self.dp_slots)
        if rows and not in_halves:
            forward_batch.mark_forward_metadata_ready()
        out = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        return out.logits_output

    def _commit(
        self,
        batch: Any,
        live: LiveBatch,
        plan: VerifyPlan,
        result: VerifyResult,
        output: Any,
        kv_plan: Any,
        positions: Tensor,
        on_publish: Callable[[Tensor], None] | None,
    ) -> GenerationBatchResult:
        """Publish the new lengths, write the draft K/V of the verified rows, hand tokens over."""
        tokens, lengths = result.tokens, result.commit_lengths
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, tokens)
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, lengths)
        bonus = tokens.gather(1, lengths[:, None] - 1).squeeze(1)
        new_seq_lens = live.prefix + lengths
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            attach_logprobs(batch, output, plan, tokens)
        self.draft.write_context(output.hidden_states, positions, kv_plan)
        output.hidden_states = None
        output.next_token_logits = None
        committed = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        self.penalties.commit(live.reqs, committed)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens.clamp(min=0).reshape(-1),
            accept_lens=lengths.to(torch.int32),
            next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=new_seq_lens),
            new_seq_lens=new_seq_lens,
            speculative_num_draft_tokens=self.gamma + 1,
            # Rows verified, anchor included: SGLang turns it into spec_cap_length.
            cap_lens=plan.lengths + 1,
            can_run_cuda_graph=False,
        )


def _extend_positions(prefix: list[int], lengths: list[int], device: Any) -> Tensor:
    """Absolute positions of a prefill's rows, request after request."""
    ranges = [torch.arange(p, p + n) for p, n in zip(prefix, lengths, strict=True)]
    return torch.cat(ranges).to(device)


def _spread(proposal: Proposal, rows: list[int], live: LiveBatch, gamma: int) -> Proposal:
    """Lay the proposal of some requests out over all of them."""
    index = torch.tensor(rows, device=live.prefix.device)

    def over_all(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        wide = values.new_zeros((len(live), *values.shape[1:]))
        wide[index] = values
        return wide

    support = proposal.support
    if support is not None and support.dim() > 1:
        support = over_all(support)
    tokens = live.anchors[:, None].repeat(1, gamma)
    tokens[index] = proposal.tokens
    return Proposal(
        tokens,
        over_all(proposal.probs),
        over_all(proposal.confidence),
        over_all(proposal.columns),
        support,
    )
