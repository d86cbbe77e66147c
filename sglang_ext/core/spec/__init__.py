"""Speculative decoding as pure functions: propose, schedule, verify, accept."""
