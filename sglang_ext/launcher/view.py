"""One launch as the rules see it: sizes, roles and model facts under plain names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_ext.core.layout import Sizes
from sglang_ext.launcher.compose import Launch
from sglang_ext.launcher.errors import ConfigError

DISPATCH_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DEFAULT_DISPATCH = 128  # SGLang 0.5.23's default of that variable


@dataclass(frozen=True)
class View:
    """What rules ask about a launch."""

    launch: Launch

    @cached_property
    def flags(self) -> dict[str, Any]:
        return self.launch.effective()

    def has(self, name: str) -> bool:
        return self.flags.get(name) not in (None, False)

    def text(self, name: str, default: str = "") -> str:
        return str(self.flags.get(name, default))

    def whole(self, name: str, default: int = 1) -> int:
        return self.launch.whole(name, default)

    @property
    def config(self) -> dict[str, Any]:
        return self.launch.model.config

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def is_v4(self) -> bool:
        return "DeepseekV4" in self.architecture

    @property
    def is_v32(self) -> bool:
        return "DeepseekV32" in self.architecture

    @property
    def experts(self) -> int:
        return int(self.config.get("n_routed_experts", self.config.get("num_experts", 0)))

    @property
    def is_quantized(self) -> bool:
        return "quantization_config" in self.config

    @property
    def on_cpu(self) -> bool:
        return self.launch.hardware.gpu.is_cpu

    @cached_property
    def sizes(self) -> Sizes:
        """`--ep-size` follows `--tp-size` where an all-to-all backend forces it."""
        tp = self.whole("tp-size")
        return Sizes(
            tp=tp,
            dp=self.whole("attn-dp-size"),
            cp=self.whole("attn-cp-size"),
            ep=tp if self.a2a != "none" else self.whole("ep-size"),
            pp=self.whole("pp-size"),
            moe_dp=self.whole("moe-dp-size"),
            nnodes=self.launch.hardware.nodes,
        )

    @property
    def attn_tp(self) -> int:
        return max(1, self.sizes.tp // (self.sizes.dp * self.sizes.cp))

    @property
    def moe_tp(self) -> int:
        return max(1, self.sizes.tp // (self.sizes.ep * self.sizes.moe_dp))

    @property
    def replicas(self) -> int:
        return self.whole("dp-size")

    @property
    def a2a(self) -> str:
        return self.text("moe-a2a-backend", "none")

    @property
    def role(self) -> str:
        """`null`, `prefill` or `decode`."""
        return self.text("disaggregation-mode", "null")

    @property
    def algorithm(self) -> str:
        return self.text("speculative-algorithm").upper()

    @property
    def draft_tokens(self) -> int:
        """Drafted per request and round; 0 without speculation."""
        if not self.algorithm:
            return 0
        if self.has("speculative-dspark-block-size"):
            return self.whole("speculative-dspark-block-size")
        if self.has("speculative-num-draft-tokens"):
            return self.whole("speculative-num-draft-tokens") - 1
        if self.algorithm == "DFLASH" and self.has("speculative-dflash-block-size"):
            return self.whole("speculative-dflash-block-size") - 1
        if self.has("speculative-num-steps") and self.whole("speculative-eagle-topk", 1) == 1:
            return self.whole("speculative-num-steps")
        draft = self.launch.model.drafts.get(self.algorithm.lower())
        return draft.gamma if draft else 7

    @property
    def running_per_rank(self) -> int:
        """Requests that one attention group may run at a time."""
        return -(-self.whole("max-running-requests", 0) // self.sizes.dp)

    @property
    def dispatch_limit(self) -> int:
        return self.variable(DISPATCH_VARIABLE, DEFAULT_DISPATCH)

    def variable(self, name: str, default: int) -> int:
        """An environment variable as a whole number; raises ConfigError for another value."""
        value = self.launch.env.get(name, str(default))
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(
                self.launch.preset.name,
                name,
                expected="a whole number",
                found=value,
                remedy=f"Correct --set {name}=N.",
            )
        return int(value)
