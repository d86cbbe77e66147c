"""Names of the packed number formats that quantised checkpoints use.

SGLang's quantisation modules only compare these, read their size and pass `id` to CUDA kernels,
so a value object is all that importing them takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

_ID_FIELD_BITS = (8, 8, 1, 32, 1, 8)
_NAN_NONE, _NAN_IEEE, _NAN_EXTENDED = 0, 1, 2


@dataclass(frozen=True)
class ScalarType:
    """A number format: exponent and mantissa bits (no exponent: an integer), sign and bias."""

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_values_only: bool = False
    nan_style: int = _NAN_IEEE

    @property
    def size_bits(self) -> int:
        return self.exponent + self.mantissa + int(self.signed)

    @cached_property
    def id(self) -> int:
        """The format packed into 58 bits, lowest first: the six fields in the order above."""
        fields = (
            self.exponent,
            self.mantissa,
            int(self.signed),
            self.bias,
            int(self.finite_values_only),
            self.nan_style,
        )
        packed, offset = 0, 0
        for field, bits in zip(fields, _ID_FIELD_BITS, strict=True):
            packed |= (field & ((1 << bits) - 1)) << offset
            offset += bits
        return packed

    def is_signed(self) -> bool:
        return self.signed

    def is_integer(self) -> bool:
        return self.exponent == 0

    def is_floating_point(self) -> bool:
        return not self.is_integer()

    def has_bias(self) -> bool:
        return self.bias != 0

    def has_nans(self) -> bool:
        return self.nan_style != _NAN_NONE

    def has_infs(self) -> bool:
        return not self.finite_values_only

    def is_ieee_754(self) -> bool:
        return self.nan_style == _NAN_IEEE and not self.finite_values_only

    def __str__(self) -> str:
        if self.is_integer():
            name = f"{'int' if self.signed else 'uint'}{self.size_bits}"
            return f"{name}b{self.bias}" if self.bias else name
        suffix = "" if self.is_ieee_754() else "f" * self.finite_values_only
        return f"float{self.size_bits}_e{self.exponent}m{self.mantissa}{suffix}"


def _unsigned(bits: int, bias: int = 0) -> ScalarType:
    return ScalarType(0, bits, False, bias)


def _float(exponent: int, mantissa: int) -> ScalarType:
    return ScalarType(exponent, mantissa, True)


class scalar_types:
    """The formats by the names that SGLang reads."""

    int4 = ScalarType(0, 3, True)
    uint4 = _unsigned(4)
    int8 = ScalarType(0, 7, True)
    uint8 = _unsigned(8)
    uint2b2 = _unsigned(2, 2)
    uint3b4 = _unsigned(3, 4)
    uint4b8 = _unsigned(4, 8)
    uint8b128 = _unsigned(8, 128)
    float8_e4m3fn = ScalarType(4, 3, True, 0, True, _NAN_EXTENDED)
    float8_e5m2 = _float(5, 2)
    float16_e8m7 = _float(8, 7)
    float16_e5m10 = _float(5, 10)
    float6_e3m2f = ScalarType(3, 2, True, 0, True, _NAN_NONE)
    float4_e2m1f = ScalarType(2, 1, True, 0, True, _NAN_NONE)
    bfloat16 = float16_e8m7
    float16 = float16_e5m10
