"""Floating-point types that numpy lacks, as the integers they lie in."""

from __future__ import annotations

import numpy as np

READ_AS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""numpy's type of the stored words."""


def to_float32(words: np.ndarray, dtype: str) -> np.ndarray:
    """Values of ``dtype``, stored as :data:`READ_AS` says, in fp32; exact but for float64."""
    if dtype == "bfloat16":
        return (words.astype("<u4") << 16).view("<f4")
    return words.astype("<f4")


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as the stored words of ``dtype``, rounded to the nearest, ties to even."""
    if dtype != "bfloat16":
        return values.astype(READ_AS[dtype])
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")
