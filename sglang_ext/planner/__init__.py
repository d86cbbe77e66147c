"""What a layout costs and which one to use: memory, time, search; no SGLang, no torch."""
