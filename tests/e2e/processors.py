"""A logit processor that requests carry with them."""

from __future__ import annotations

import json
from typing import Any

import dill


def forbid() -> str:
    """A serialised processor that bans the token ids in `custom_params["forbidden"]`.

    The form is that of SGLang's `CustomLogitProcessor.to_str`; a local class travels by value.
    """

    class Forbid:
        def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
            for row, params in zip(logits, custom_param_list, strict=True):
                row[params["forbidden"]] = float("-inf")
            return logits

    return json.dumps({"callable": dill.dumps(Forbid).hex()})


def force() -> str:
    """A serialised processor that leaves one token to choose, `custom_params["token"]`.

    What biases and penalties did to the logits before it must not matter.
    """

    class Force:
        def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
            for row, params in zip(logits, custom_param_list, strict=True):
                row[:] = -1e4
                row[params["token"]] = 0.0
            return logits

    return json.dumps({"callable": dill.dumps(Force).hex()})
