"""From a preset to a running server or to what a cluster runs; imports no SGLang."""
