"""Attention over cached latents that a row sees all of, as they are or expanded."""

from sglang_ext.kernels.latent_attention.api import attend_expanded, attend_visible

__all__ = ["attend_expanded", "attend_visible"]
