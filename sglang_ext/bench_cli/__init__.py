"""A grid over SGLang's own benchmark tools, each setting checked for correctness first."""
