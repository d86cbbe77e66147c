"""Speculative workers: one seam, two drafters."""
