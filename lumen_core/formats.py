"""Element formats and the rule that maps hardware to a flavour of FP8.

An *element format* is what one code means; a *flavour* is which of two encodings the 8-bit formats use. gfx942
(MI300X, MI325X) computes in FNUZ, everything else in OCP. This file is the only place that knows torch's float8
dtypes; the rest of the package asks for a format by name.

Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0 for E4M3/E5M2; OCP Microscaling Formats (MX) v1.0
sections 5.3 and 5.4 for E2M1 and E8M0; "8-bit Numerical Formats for Deep Neural Networks" (arXiv 2206.02915) for FNUZ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lumen_core.tracing import constant_when_traced

FLAVOURS = ("ocp", "fnuz")

# OCP MX v1.0, section 5.4.1: one byte, 2**(byte - 127); 255 is NaN.
E8M0_DTYPE = torch.float8_e8m0fnu
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True)
class ElementFormat:
    """One low-precision element encoding.

    Attributes:
        name: `e4m3`, `e5m2` or `e2m1`.
        flavour: `ocp` or `fnuz`; E2M1 exists in OCP only and reads `ocp`.
        bits: storage bits of one code.
        exponent_bits, mantissa_bits: field widths.
        bias: exponent bias; the smallest normal number is `2**(1 - bias)`.
        emax: exponent of the largest finite value, `floor(log2(max))`.
        max: largest finite value; casts saturate here.
        dtype: torch dtype of a tensor of codes. E2M1 codes travel two to a `torch.uint8` byte.
    """

    name: str
    flavour: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max: float
    dtype: torch.dtype

    @property
    def packed(self) -> bool:
        """True where two codes share a byte."""
        return self.bits == 4


_FORMATS = {
    ("e4m3", "ocp"): ElementFormat("e4m3", "ocp", 8, 4, 3, 7, 8, 448.0, torch.float8_e4m3fn),
    ("e4m3", "fnuz"): ElementFormat("e4m3", "fnuz", 8, 4, 3, 8, 7, 240.0, torch.float8_e4m3fnuz),
    ("e5m2", "ocp"): ElementFormat("e5m2", "ocp", 8, 5, 2, 15, 15, 57344.0, torch.float8_e5m2),
    ("e5m2", "fnuz"): ElementFormat("e5m2", "fnuz", 8, 5, 2, 16, 15, 57344.0, torch.float8_e5m2fnuz),
    ("e2m1", "ocp"): ElementFormat("e2m1", "ocp", 4, 2, 1, 1, 2, 6.0, torch.uint8),
}

ELEMENT_NAMES = ("e4m3", "e5m2", "e2m1")


def element_format(name: str, flavour: str = "ocp") -> ElementFormat:
    """The format called `name` in `flavour`.

    Raises:
        ValueError: unknown name or flavour.
    """
    if flavour not in FLAVOURS:
        raise ValueError(f"flavour={flavour!r}: must be one of {', '.join(FLAVOURS)}")
    if name not in ELEMENT_NAMES:
        raise ValueError(f"element format {name!r}: must be one of {', '.join(ELEMENT_NAMES)}")
    return _FORMATS[(name, "ocp" if name == "e2m1" else flavour)]


def flavour_of(arch: str) -> str:
    """`fnuz` for the gfx94x family, `ocp` for every other architecture.

    The decision is by architecture name: a rule on capability numbers would call an H200 (9.0) a FNUZ device.

    Args:
        arch: as `arch_of` gives it, e.g. `gfx942`, `gfx950`, `sm_90`, `cpu`.
    """
    return "fnuz" if arch.startswith("gfx94") else "ocp"


def arch_of(device: torch.device | str) -> str:
    """Architecture of a torch device: `cpu`, `gfx942`, `sm_90`, ...; the device type where there is no finer name."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        # gcnArchName carries feature flags: "gfx942:sramecc+:xnack-".
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@constant_when_traced
def _device_flavour(device_type: str) -> str:
    # All devices of one process are of one architecture; the index is left out so that compiled graphs stay shared.
    return flavour_of(arch_of(device_type))


def resolve_flavour(setting: str, device: torch.device) -> str:
    """The flavour in force: `setting` itself, or the device's own where it is `auto`.

    A setting other than `auto` makes gfx942 arithmetic testable on any machine.
    """
    if setting != "auto":
        return setting
    if torch.version.hip is None or device.type != "cuda":
        return "ocp"
    return _device_flavour(device.type)
