"""The draft on one rank: its model, its K/V and its ranks, and the forward over a block.

Draft K/V live in a pool of their own at the slots of the target's K/V. Each committed token's
draft K/V are written from the target's features in the pass that computed them, so prefix
sharing, retraction and rejection need nothing further: what was not committed is written over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor

from sglang_ext.core.spec.block import BlockLayout
from sglang_ext.srt.args import read_draft, target_facts
from sglang_ext.srt.models.draft_backbone import beside_target
from sglang_ext.srt.spec.checkpoint import local_folder
from sglang_ext.srt.spec.live import LiveBatch
from sglang_ext.srt.spec.ranks import without_exchange
from sglang_ext.srt.spec.verify_input import block_batch, make_block_input


class DraftSide:
    """Builds the draft of a target beside it, and runs it.

    config: what the checkpoint says; layout: its block, for `gamma` drafts.
    """

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        algorithm: str,
        gamma: int,
    ) -> None:
        target = target_worker.model_runner
        folder = local_folder(get_spec().speculative_draft_model_path)
        self.config = read_draft(folder, algorithm, target_facts(target.model_config))
        self.layout = BlockLayout(gamma, self.config.anchor_predicts)
        self._algorithm = SpeculativeAlgorithm.from_string(algorithm)
        self._block_info = make_block_input(self.layout.query_rows, target_worker.device)
        self.parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(
                target.spec_aux_config.draft_model_config, spec_algorithm=target.spec_algorithm
            ),
            collapse_cp=True,
        )
        # The draft's rope table is sized for the target's context (`attach_target`), so a draft
        # whose own config ends sooner is no error.
        longer_context = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True)
        vocab = target.model_config.vocab_size
        with self.ranks(), longer_context, beside_target(vocab):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=target.model_config,
                algo_label=algorithm,
                random_seed=target_worker.random_seed,
            )
        self.worker = bundle.draft_worker
        self.runner = bundle.draft_model_runner
        self.model: Any = bundle.draft_model
        with self.ranks():
            self.model.attach_target(
                target.model.get_input_embeddings(),
                target.model.lm_head,
                target.model_config.context_len + self.config.block_size + 1,
            )

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """The draft's own placement: attention TP under DP attention, all of TP under CP alone.

        Only ranks with the same requests draft together, so experts of a draft that has some are
        split over those ranks, without the target's exchange.
        """
        with draft_tp_context(self.parallel_layout), without_exchange():
            yield

    def write_context(self, features: Tensor, positions: Tensor, plan: Any) -> None:
        """Write the draft K/V of target rows.

        Args:
            features: [rows, captured layers x hidden], at least one row per position.
            positions: [rows] int64.
            plan: SGLang's plan of the pass that computed them, which knows their slots.
        """
        rows = len(positions)
        slots = plan.write_ids(self.runner.kv_index_translator)[:rows]
        with self.ranks():
            self.model.write_context(
                features[:rows], positions, slots, self.runner.token_to_kv_pool
            )

    def hidden(self, live: LiveBatch) -> Tensor:
        """Run the draft over a block for each request: [R, gamma, hidden], predicting rows only.

        Called on the draft's own `ranks`.
        """
        layout = self.layout
        batch = block_batch(
            self.runner,
            live,
            layout.block_ids(live.anchors, self.config.mask_token_id),
            layout.block_positions(live.prefix),
            self._block_info,
            self._algorithm,
        )
        with torch.inference_mode():
            hidden = self.runner.forward(batch).logits_output.hidden_states
        return layout.predictions(hidden.view(len(live), layout.query_rows, -1))
