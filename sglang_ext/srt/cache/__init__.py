"""Token pools for models whose state per token is not a plain key and value."""
