"""Parallel layouts on any device that torch.distributed serves: expert exchange, CP, TBO, EPLB."""
