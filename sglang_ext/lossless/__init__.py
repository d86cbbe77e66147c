"""A checker that says whether speculative decoding changed what a server answers.

It knows servers only by their HTTP interface, so it serves SGLang's own drafters, vLLM and any
other OpenAI-compatible engine as it serves ours. Imports no SGLang.
"""
