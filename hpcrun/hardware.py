"""What vendors publish of accelerators and networks: the denominators of MFU and of cost models.

The figures and their sources stand in ``hardware.yaml``. ``None`` and a missing precision
mean that the vendor publishes no figure, never zero.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from hpcrun.config import load_yaml, validate
from hpcrun.errors import UserError
from hpcrun.recipe import ByteCount, Section

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Rate = Annotated[float, Field(gt=0)]
E = TypeVar("E")

_TABLE = Path(__file__).with_name("hardware.yaml")


class Accelerator(Section):
    """One device as the framework counts them: a GPU, or one GCD of an MI250X."""

    device_names: list[str] = Field(
        default_factory=list, description="whole names as torch.cuda.get_device_name() and NVML give them"
    )
    peak: dict[Precision, Rate] = Field(
        default_factory=dict,
        description="FLOP/s of dense matrix products, without sparsity, on the fastest units of the device",
    )
    memory: ByteCount | None = Field(None, description="bytes")
    memory_bandwidth: Rate | None = Field(None, description="bytes/s")
    link_bandwidth: Rate | None = Field(
        None,
        description="bytes/s in one direction, all links to peers in the node; None: peers talk over PCIe",
    )
    host_bandwidth: Rate | None = Field(None, description="bytes/s in one direction to the CPU, mostly PCIe")
    tdp: Rate | None = Field(None, description="watts")
    source: str


class Network(Section):
    """One network card."""

    bandwidth: Rate = Field(description="bytes/s in one direction")
    source: str


class Hardware(Section):
    """The whole table, by name."""

    accelerators: dict[str, Accelerator]
    networks: dict[str, Network]


@cache
def load_hardware() -> Hardware:
    """The table that ships with hpcrun."""
    return validate(load_yaml(_TABLE), Hardware)


def accelerator(name: str) -> Accelerator:
    """The entry ``name``, such as ``A100-SXM4-80GB``.

    Raises:
        UserError: no such entry; names the nearest ones.
    """
    return _entry(load_hardware().accelerators, name, "accelerator")


def network(name: str) -> Network:
    """The entry ``name``, such as ``NDR-400``.

    Raises:
        UserError: no such entry; names the nearest ones.
    """
    return _entry(load_hardware().networks, name, "network")


def match(device_name: str) -> Accelerator | None:
    """The entry of a device by the name that torch.cuda.get_device_name() or NVML gives it.

    Whole names are compared, so that a MIG slice or a slower card of the same family
    ("NVIDIA H200 NVL") gets no figure rather than a wrong one. Older drivers leave
    "NVIDIA" out.
    """
    wanted = _bare(device_name)
    for entry in load_hardware().accelerators.values():
        if wanted in map(_bare, entry.device_names):
            return entry
    return None


def _bare(device_name: str) -> str:
    return device_name.strip().removeprefix("NVIDIA ")


def _entry(table: dict[str, E], name: str, kind: str) -> E:
    if name not in table:
        wanted = name.casefold()
        folded = {known.casefold(): known for known in table}
        near = [key for key in folded if wanted in key] or difflib.get_close_matches(wanted, folded)
        hint = (
            f"did you mean {' or '.join(folded[key] for key in near)}?"
            if near
            else f"known: {', '.join(table)}"
        )
        raise UserError(f"no {kind} {name!r}; {hint}")
    return table[name]
