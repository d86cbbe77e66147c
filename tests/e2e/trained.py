"""DFLASH drafts that guess often enough to test with: a few seconds of training on the target.

A Markov head can copy the target's last-token law; a DFLASH draft has no such part, so its block is
fitted to the target's own greedy answers. Only the tests' reference implementation is used.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle.reference_decode import load_target
from tests.oracle.reference_draft import ReferenceDraft
from tests.tiny import PAD

SEQUENCES, LENGTH, PROMPT, BATCH = 300, 32, 4, 64
# The nearest context decides for these targets; later rows of a block are left untrained.
CONTEXT, ROWS, DECAY = 10, 6, 0.8


@torch.no_grad()
def _answers(model: object, seed: int) -> Tensor:
    """[SEQUENCES, LENGTH] int64: random prompts and the target's greedy answers to them."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(256, (SEQUENCES, PROMPT), generator=generator)
    return model.generate(  # type: ignore[attr-defined]
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=LENGTH - PROMPT,
        min_new_tokens=LENGTH - PROMPT,
        do_sample=False,
        pad_token_id=PAD,
    )


def fit(path: Path, target: Path, *, steps: int = 300, seed: int = 5) -> Path:
    """Train the DFLASH checkpoint at `path` in place; deterministic for a seed."""
    model = load_target(target)
    ids = _answers(model, seed)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    draft = ReferenceDraft.load(path, model.get_input_embeddings().weight.detach(), _head(model))
    features = torch.cat([_feature(states[i + 1]) for i in draft.layer_ids], dim=-1)
    fixed = {"d2t"}
    trained = {k: v.requires_grad_() for k, v in draft.tensors.items() if k not in fixed}
    optimiser = torch.optim.Adam(trained.values(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = _loss(draft, ids, features, generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    save_file(
        {k: v.detach().contiguous() for k, v in draft.tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def _feature(output: Tensor) -> Tensor:
    """A layer's output [sequences, length, hidden]; of several streams a token, their mean."""
    return output.mean(dim=2) if output.dim() == 4 else output


def _head(model: object) -> Tensor:
    return model.get_output_embeddings().weight.detach()  # type: ignore[attr-defined]


def _loss(
    draft: ReferenceDraft, ids: Tensor, features: Tensor, generator: torch.Generator
) -> Tensor:
    rows = min(ROWS, draft.get("block_size"))
    own = int(draft.own_position)
    chosen = torch.randint(ids.shape[0], (BATCH,), generator=generator)
    ids, features = ids[chosen], features[chosen]
    starts = torch.randint(PROMPT - 2, LENGTH - rows - 1, (BATCH,), generator=generator)
    each = torch.arange(BATCH)
    context = starts[:, None] - CONTEXT + torch.arange(CONTEXT)
    valid, context = context >= 0, context.clamp(min=0)
    c = draft.fuse(features[each[:, None], context])
    hidden = draft.block(c, context, valid, ids[each, starts], starts, rows)
    labels = ids[each[:, None], starts[:, None] + torch.arange(own, rows) + 1 - own]
    logits = draft.logits(hidden[:, own:])
    if "d2t" in draft.tensors:
        columns = torch.full((draft.head.shape[0],), -100)
        columns[draft.target_ids] = torch.arange(len(draft.target_ids))
        labels = columns[labels]
    each_row = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    weights = DECAY ** torch.arange(rows - own)
    return (each_row.view(BATCH, -1) * weights).sum(1).mean()


def with_tensors(source: Path, path: Path, config: str, extra: dict[str, Tensor]) -> Path:
    """A copy of a trained draft under another config, with tensors added."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config)
    tensors = load_file(source / "model.safetensors") | extra
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
