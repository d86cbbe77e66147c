"""What one request asks of speculation, and how many drafts it can use this round.

`custom_params: {"speculative": false}` turns drafting off for a request, `{"gamma": n}` caps it.
"""

from __future__ import annotations

from typing import Any


def _asked_cap(params: Any, gamma: int) -> int:
    if not isinstance(params, dict):
        return gamma
    if params.get("speculative") is False:
        return 0
    asked = params.get("gamma")
    return gamma if asked is None else min(gamma, asked)


def option_error(params: Any) -> str | None:
    """Why a request's custom_params cannot be honoured; None when they can."""
    if not isinstance(params, dict):
        return None
    speculative, gamma = params.get("speculative"), params.get("gamma")
    if speculative is not None and not isinstance(speculative, bool):
        return (
            f"custom_params.speculative: expected true or false, found {speculative!r}. "
            "Leave it out to draft as the server does."
        )
    if gamma is not None and (isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 0):
        return (
            f"custom_params.gamma: expected a whole number of drafts from 0 up, found {gamma!r}. "
            "Leave it out to draft as the server does."
        )
    return None


def request_error(req: Any) -> str | None:
    """Why our worker cannot serve a request as asked; None when it can."""
    if req.return_hidden_states:
        return (
            "return_hidden_states: expected false with DSPARK or DFLASH, found true. The hidden "
            "states of a round belong to drafts as well as to output; ask a server without "
            "speculation."
        )
    if req.return_sampling_mask:
        return (
            "return_sampling_mask: expected false with DSPARK or DFLASH, found true. Ask a server "
            "without speculation."
        )
    if req.custom_logit_processor is not None:
        # Such a request drafts nothing (`draft_cap`), and the parameters are its processor's.
        return None
    return option_error(req.sampling_params.custom_params)


def draft_cap(req: Any, position: int, gamma: int, context_length: int) -> int:
    """Drafts that can still become output of `req`, whose anchor stands at `position`.

    A round commits one token more than it accepts, so the last token it may emit bounds the cap.
    A custom logit processor reads the request's output as it is, so such a request decodes one
    token a round.
    """
    if req.custom_logit_processor is not None:
        return 0
    sampling = req.sampling_params
    emitted = position + 1 - len(req.origin_input_ids)
    left = context_length - 1 - position
    if sampling.max_new_tokens is not None:
        left = min(left, sampling.max_new_tokens - emitted)
    return max(min(_asked_cap(sampling.custom_params, gamma), left - 1), 0)
