"""Element casts, bit for bit against `ml_dtypes`: every code, every midpoint and its neighbours, every edge value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import (
    ELEMENTS,
    FP8,
    all_values,
    bytes_of,
    decode_codes,
    encode_saturating,
    raw_codes,
    round_exact,
)

from lumen_core import casts
from lumen_core.formats import arch_of, element_format, flavour_of, resolve_flavour

ALL = list(ELEMENTS)


def formats(key: tuple[str, str]):
    return element_format(*key), ELEMENTS[key]


def encoded(x: np.ndarray, key: tuple[str, str], device: torch.device, noise: torch.Tensor | None = None) -> np.ndarray:
    """Codes of fp32 values by the package, one integer a value."""
    fmt, element = formats(key)
    tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(device).reshape(1, -1)
    if noise is not None:
        noise = noise.to(device).reshape(1, -1)
    codes = casts.encode(tensor, fmt, noise)
    assert codes.dtype == element.torch_dtype
    return raw_codes(codes, element, tensor.shape[1]).reshape(-1)


def assert_codes(x: np.ndarray, key: tuple[str, str], device: torch.device) -> None:
    x = np.asarray(x, dtype=np.float32)
    got, want = encoded(x, key, device), encode_saturating(x, ELEMENTS[key])
    wrong = got != want
    assert not wrong.any(), f"{x[wrong][:4]} gave {got[wrong][:4]}, ml_dtypes gives {want[wrong][:4]}"


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_table_of_formats(key):
    fmt, element = formats(key)
    values = all_values(element)
    finite = np.abs(values[np.isfinite(values)])
    assert fmt.max == element.max == finite.max()
    assert fmt.emax == int(np.floor(np.log2(finite.max())))
    assert fmt.mantissa_bits == element.mantissa_bits and fmt.bits == (4 if key[0] == "e2m1" else 8)
    assert 1 - fmt.bias == element.emin
    assert finite[finite > 0].min() == 2.0 ** (1 - fmt.bias - fmt.mantissa_bits)
    assert fmt.dtype == element.torch_dtype
    assert fmt.name == element.name and fmt.flavour == element.flavour


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_every_code_decodes_as_ml_dtypes(key, device):
    fmt, element = formats(key)
    codes = torch.arange(element.codes, dtype=torch.uint8, device=device).reshape(1, -1)
    codes = casts.pack_fp4(codes) if fmt.packed else codes.view(fmt.dtype)
    got = casts.decode(codes, fmt).double().cpu().numpy().reshape(-1)
    np.testing.assert_array_equal(got, all_values(element))
    signs = np.signbit(got), np.signbit(all_values(element))
    np.testing.assert_array_equal(signs[0][~np.isnan(got)], signs[1][~np.isnan(got)])


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_every_finite_code_round_trips(key, device):
    element = ELEMENTS[key]
    values = all_values(element)
    finite = np.isfinite(values)
    got = encoded(values[finite].astype(np.float32), key, device)
    np.testing.assert_array_equal(got, np.arange(element.codes, dtype=np.uint8)[finite])


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_midpoints_and_their_neighbours(key, device):
    values = all_values(ELEMENTS[key])
    grid = np.unique(values[np.isfinite(values)])
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    on_grid = grid.astype(np.float32)
    points = [
        middle,
        up,
        down,
        on_grid,
        np.nextafter(on_grid, np.float32(np.inf)),
        np.nextafter(on_grid, -np.float32(np.inf)),
    ]
    assert_codes(np.concatenate(points), key, device)


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_random_values_over_the_whole_range_of_fp32(key, device):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    bits = bits[~np.isnan(bits)]
    element = ELEMENTS[key]
    near = np.float32(element.max) * np.exp2(rng.uniform(-24, 1, 100_000)).astype(np.float32)
    assert_codes(np.concatenate([bits, near, -near]), key, device)


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_saturates_instead_of_overflowing(key, device):
    element = ELEMENTS[key]
    top = np.float32(element.max)
    x = np.array([top, np.nextafter(top, np.float32(np.inf)), top * 1.01, top * 1.1, top * 2, 1e30, 3.4e38, np.inf])
    for sign in (1, -1):
        decoded = decode_codes(encoded(sign * x, key, device), element)
        np.testing.assert_array_equal(decoded, np.full(x.size, sign * element.max))


@pytest.mark.parametrize("key", FP8, ids="-".join)
def test_nan_stays_nan(key, device):
    nan = np.array([np.nan, -np.nan, 1.0], dtype=np.float32)
    decoded = decode_codes(encoded(nan, key, device), ELEMENTS[key])
    assert np.isnan(decoded[:2]).all() and decoded[2] == 1.0


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_signed_zero_and_underflow(key, device):
    element = ELEMENTS[key]
    smallest = 2.0 ** (element.emin - element.mantissa_bits)
    x = np.array([0.0, -0.0, smallest / 2, -smallest / 2, smallest * 0.49, -smallest * 0.49, 1e-45, -1e-45], np.float32)
    got = encoded(x, key, device)
    if element.flavour == "fnuz":
        np.testing.assert_array_equal(got, 0)  # 0x80 is NaN there
    else:
        sign = 0x8 if key[0] == "e2m1" else 0x80
        np.testing.assert_array_equal(got, [0, sign] * 4)


@pytest.mark.parametrize("key", ALL, ids="-".join)
def test_half_precision_inputs(key, device):
    """bf16 and fp16 values are exact in fp32, so they round as their fp32 selves do."""
    fmt, element = formats(key)
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = bits[torch.isfinite(bits.float())].reshape(1, -1)
        codes = raw_codes(casts.encode(x.to(device).float(), fmt), element, x.shape[1]).reshape(-1)
        np.testing.assert_array_equal(codes, encode_saturating(x.float().numpy().reshape(-1), element))


def test_our_exact_rounding_agrees_with_ml_dtypes():
    """The fp64 reference that the MX tests stand on is itself checked."""
    rng = np.random.default_rng(1)
    for element in ELEMENTS.values():
        x = (element.max * np.exp2(rng.uniform(-24, 0.5, 20_000)) * rng.choice([-1, 1], 20_000)).astype(np.float32)
        np.testing.assert_array_equal(round_exact(x, element), decode_codes(encode_saturating(x, element), element))


# --- flavours (B65) ---------------------------------------------------------------------------------------------


def test_b65_flavour_by_architecture():
    assert [flavour_of(arch) for arch in ("gfx942", "gfx941", "gfx940")] == ["fnuz"] * 3
    others = ("gfx950", "gfx90a", "gfx1100", "gfx1201", "sm_80", "sm_90", "sm_100", "cpu")
    assert {flavour_of(arch) for arch in others} == {"ocp"}


def test_b65_capability_nine_zero_without_hip_is_ocp(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda = torch.device("cuda", 0)
    assert arch_of(cuda) == "sm_90"
    assert resolve_flavour("auto", cuda) == "ocp"
    assert element_format("e4m3", resolve_flavour("auto", cuda)).dtype == torch.float8_e4m3fn


def test_b65_hip_gfx942_is_fnuz_and_gfx950_is_not(monkeypatch):
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    assert arch_of("cuda") == "gfx942" and resolve_flavour("auto", torch.device("cuda")) == "fnuz"
    Properties.gcnArchName = "gfx950:sramecc+:xnack-"
    assert arch_of("cuda") == "gfx950"
    assert resolve_flavour("auto", torch.device("cuda")) == "ocp"


def test_b65_setting_overrides_the_device(device):
    assert resolve_flavour("fnuz", device) == "fnuz" and resolve_flavour("ocp", device) == "ocp"


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_b65_ocp_to_fnuz_keeps_every_decoded_value(name, device):
    source, target = ELEMENTS[(name, "ocp")], ELEMENTS[(name, "fnuz")]
    values = all_values(source)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(source.torch_dtype)
    scale = torch.tensor(0.37, device=device)
    out, new_scale, fmt = casts.convert_flavour(codes, scale, element_format(name), "fnuz")
    assert out.dtype == target.torch_dtype and fmt == element_format(name, "fnuz")
    assert new_scale.item() == 2 * scale.item()
    decoded = decode_codes(bytes_of(out), target) * 2
    finite = np.isfinite(values)
    np.testing.assert_array_equal(decoded[finite], values[finite])
    assert np.isnan(decoded[~finite]).all()
    raw = bytes_of(out)
    assert raw[0x80] == 0x00 and raw[0x38] == 0x38 and raw[0x01] == 0x01
    if name == "e4m3":
        assert decoded[0x7E] == 448


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_b65_there_and_back_keeps_every_decoded_value(name, device):
    """An OCP checkpoint read and saved again on gfx942 must not change."""
    source = ELEMENTS[(name, "ocp")]
    values = all_values(source)
    finite = np.isfinite(values)
    raw = torch.arange(256, dtype=torch.uint8)[torch.from_numpy(finite)].to(device)
    there, scale, fmt = casts.convert_flavour(
        raw.view(source.torch_dtype), torch.tensor(1.0, device=device), element_format(name), "fnuz"
    )
    back, scale, fmt = casts.convert_flavour(there, scale, fmt, "ocp")
    assert fmt == element_format(name)
    np.testing.assert_array_equal(decode_codes(bytes_of(back), source) * scale.item(), values[finite])
