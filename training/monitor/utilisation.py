"""Model FLOP utilisation (Chowdhery et al., 2204.02311, appendix B): useful operations over the peak."""

from __future__ import annotations

import torch

from hpcrun.counts import training_flops
from hpcrun.hardware import match
from hpcrun.recipe import Model


class Utilisation:
    """Turns tokens per second of all ranks into FLOP/s and a share of their peak.

    The peak is the vendor's dense figure for the type of the matrix products, from
    ``hpcrun/hardware.yaml``; a device that is not in the table has none.
    """

    def __init__(self, model: Model, device_name: str | None, precision: str, ranks: int) -> None:
        self._flops_per_token = training_flops(model)
        entry = match(device_name) if device_name else None
        peaks: dict[str, float] = {str(name): peak for name, peak in entry.peak.items()} if entry else {}
        peak = peaks.get(precision)
        self._peak = peak * ranks if peak else None

    def of(self, tokens_per_s: float) -> dict[str, float]:
        """``model_flops_per_s`` and, where the peak is known, ``mfu``."""
        flops = self._flops_per_token * tokens_per_s
        return {"model_flops_per_s": flops} | ({"mfu": flops / self._peak} if self._peak else {})


def device_name(device: torch.device) -> str | None:
    """What the driver calls the device; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def product_type(precision: str, device: torch.device) -> str:
    """The type that matrix products are computed in: fp32 may be tf32 on a GPU."""
    if precision == "fp32" and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return precision
