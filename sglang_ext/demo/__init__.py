"""The built-in model: SmolLM2-135M-Instruct and the drafts trained for it."""
