"""The hardware table: figures without sparsity, and device names as drivers give them."""

from __future__ import annotations

import pytest

from hpcrun.errors import UserError
from hpcrun.hardware import Accelerator, Precision, accelerator, load_hardware, match, network

GPUS = {name: entry for name, entry in load_hardware().accelerators.items() if name != "cpu-core"}


@pytest.mark.parametrize(
    ("device_name", "entry"),
    {
        "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
        "A100-SXM4-40GB": "A100-SXM4-40GB",
        "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
        "NVIDIA H100 80GB HBM3": "H100-SXM5",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA B200": "B200",
        "NVIDIA GH200 120GB": "GH200",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA GH200 144G HBM3e": "GH200-144GB",
        "AMD Instinct MI250X": "MI250X",
        "AMD Instinct MI300X VF": "MI300X",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX4090",
    }.items(),
)
def test_a_device_is_known_by_the_name_its_driver_gives(device_name: str, entry: str) -> None:
    assert match(device_name) is accelerator(entry)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H200 NVL",
        "NVIDIA H100 NVL",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI250",
        "",
    ],
)
def test_a_slice_or_a_slower_sister_gets_no_figure(device_name: str) -> None:
    assert match(device_name) is None


def test_no_device_name_stands_at_two_entries() -> None:
    names = [name for entry in GPUS.values() for name in entry.device_names]
    assert len(names) == len(set(names))
    assert all(entry.device_names for entry in GPUS.values())


@pytest.mark.parametrize(
    ("entry", "precision", "teraflops"),
    [
        ("V100-SXM2-32GB", "fp16", 125),
        ("A100-SXM4-80GB", "bf16", 312),
        ("A100-SXM4-80GB", "tf32", 156),
        ("H100-SXM5", "bf16", 989.4),
        ("H100-PCIe", "bf16", 756),
        ("B200", "bf16", 2250),
        ("MI250X", "bf16", 191.5),
        ("MI300X", "bf16", 1307.4),
        ("L40S", "bf16", 362.05),
        ("RTX4090", "bf16", 165.2),
    ],
)
def test_peaks_are_dense(entry: str, precision: Precision, teraflops: float) -> None:
    """Datasheets print the H100's 1979 TFLOP/s with sparsity, which would halve the MFU."""
    assert accelerator(entry).peak[precision] == pytest.approx(teraflops * 1e12)


def test_the_h200_computes_like_the_h100_and_remembers_more() -> None:
    h100, h200 = accelerator("H100-SXM5"), accelerator("H200")
    assert h200.peak == h100.peak
    assert h200.memory == 141 * 2**30
    assert h200.memory_bandwidth == 4.8e12


@pytest.mark.parametrize("entry", GPUS.values(), ids=GPUS)
def test_figures_agree_with_one_another(entry: Accelerator) -> None:
    """Catches a slipped power of ten and a sparse figure among dense ones.

    Matrix units do about twice the work on operands of half the width.
    """
    peak = entry.peak
    assert peak["fp16"] == peak.get("bf16", peak["fp16"])
    if "tf32" in peak:
        assert peak["fp16"] / peak["tf32"] == pytest.approx(2, rel=0.03)
    if "fp8" in peak:
        assert peak["fp8"] / peak["fp16"] == pytest.approx(2, rel=0.03)
    assert peak["fp32"] < peak["fp16"]
    assert entry.memory is not None
    assert entry.memory_bandwidth is not None
    assert entry.tdp is not None
    assert entry.host_bandwidth is not None
    assert 24 * 2**30 <= entry.memory < 256 * 2**30
    assert 0.8e12 <= entry.memory_bandwidth <= 8e12
    assert 250 <= entry.tdp <= 1000
    assert 16e9 <= entry.host_bandwidth <= (entry.link_bandwidth or entry.host_bandwidth)
    assert 0.2e12 < peak["fp16"] / entry.tdp < 2.5e12


def test_a_cpu_has_no_peak_and_is_no_device() -> None:
    cpu = accelerator("cpu-core")
    assert cpu.peak == {}
    assert (cpu.memory, cpu.memory_bandwidth, cpu.link_bandwidth, cpu.tdp) == (None,) * 4


def test_network_cards_carry_their_signalling_rate_in_bytes() -> None:
    gigabits: dict[str, float] = {
        "HDR-200": 200,
        "NDR-400": 400,
        "Slingshot-11": 200,
        "Ethernet-100": 100,
        "Ethernet-400": 400,
    }
    gigabits |= {"EFA-v1": 400 / 4, "EFA-v2": 3200 / 32, "EFA-v3": 3200 / 16, "EFA-v4": 3200 / 8}
    assert {name: entry.bandwidth * 8 / 1e9 for name, entry in load_hardware().networks.items()} == gigabits
    assert network("NDR-400").bandwidth == 50e9


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match="no accelerator 'a100-sxm'; did you mean A100-SXM4-40GB or A100-SXM4-80GB"
    ):
        accelerator("a100-sxm")
    with pytest.raises(UserError, match="did you mean MI300X"):
        accelerator("MI300")
    with pytest.raises(UserError, match="did you mean NDR-400"):
        network("NDR400")
    with pytest.raises(UserError, match=r"known: V100-SXM2-32GB, .*cpu-core"):
        accelerator("quantum")
