"""Attention over cached latents: all visible ones, selected ones, or expanded ones."""

from sglang_ext.kernels.latent_attention.api import (
    attend_expanded,
    attend_selected,
    attend_visible,
)

__all__ = ["attend_expanded", "attend_selected", "attend_visible"]
