"""Putting a checkpoint's tensors into a model's parameters, and saying which do not fit."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor

from sglang_ext.srt.models.placement import Placement


class CheckpointTensorError(ValueError):
    """A checkpoint whose tensors are not those its config.json calls for.

    title: what messages call the model.
    """

    title = ""

    def __init__(self, name: str, *, expected: str, found: object) -> None:
        super().__init__(
            f"{self.title} checkpoint, {name}: expected {expected}, found {found}. "
            f"Compare config.json and the weight files; they must be of one checkpoint."
        )
        self.tensor = name


def put(parameter: Any, place: Placement, tensor: Tensor) -> None:
    """Load `tensor` into the parameter that `place` names, through its own loader."""
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    if place.expert is not None:
        loader(parameter, tensor, place.parameter, shard_id=place.shard, expert_id=place.expert)
    elif place.shard is not None:
        loader(parameter, tensor, place.shard)
    else:
        loader(parameter, tensor)


def refuse_missing(missing: list[str], error: type[CheckpointTensorError]) -> None:
    """Raise `error` naming the first of `missing`, and how many more there are."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise error(missing[0] + more, expected="a tensor", found="none")
