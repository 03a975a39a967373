"""MORI collectives over a strict fake of MORI: bit for bit what c10d gives, and nothing that MORI gets wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lumen_core.comm import mori
from lumen_core.comm.collectives import C10dCollectives, collectives_for
from lumen_core.comm.meter import ByteMeter

SUM, AVG, MAX, MIN = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN"))
CPU = torch.device("cpu")


def fake_mori(group: dist.ProcessGroup | None = None) -> ModuleType:
    """The fake, installed; loaded from its file, for a folder on the path would shadow a real MORI."""
    path = Path(__file__).resolve().parents[1] / "fakes" / "mori.py"
    spec = importlib.util.spec_from_file_location("fake_mori", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["MORI_ENABLE_SDMA"] = "1"
    module.install(dist.group.WORLD if group is None else group)
    return module


def _pair(transit_bytes: int) -> tuple[mori.MoriCollectives, C10dCollectives]:
    ours = mori.MoriCollectives(dist.group.WORLD, CPU, ByteMeter(), transit_bytes=transit_bytes)
    return ours, C10dCollectives(dist.group.WORLD, ByteMeter())


def _same_as_c10d(rank: int, size: int, transit_bytes: int) -> None:
    fake = fake_mori()
    ours, c10d = _pair(transit_bytes)
    kept = []
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32, torch.int32):
        for n in (0, 1, 7, 32, 100):
            everyone = torch.arange(size * size * n).remainder(23).sub(11)  # exact in any order of summation
            everyone = everyone.to(torch.uint8 if dtype.itemsize == 1 else dtype).view(size, size * n)
            x = everyone[rank].view(dtype) if dtype.itemsize == 1 else everyone[rank]
            for async_op in (False, True):
                results = []
                for comm in (ours, c10d):
                    gathered, exchanged = x.new_empty(size * size * n), torch.empty_like(x)
                    works = [comm.all_gather(gathered, x, async_op=async_op, label="w")]
                    works.append(comm.all_to_all(exchanged, x, async_op=async_op))
                    outs = [gathered, exchanged]
                    for op in (SUM, MAX) if dtype.itemsize > 1 else ():
                        outs += [x.clone(), x.new_empty(n)]
                        works.append(comm.all_reduce(outs[-2], op, async_op=async_op))
                        works.append(comm.reduce_scatter(outs[-1], x, op, async_op=async_op))
                    assert all((work is not None) == async_op for work in works)
                    # Waited for out of order: with ours the next operation has finished each of them anyway.
                    assert all(work.wait() for work in (works[::-1] if comm is ours else works) if work)
                    results.append([out.view(torch.uint8) if dtype.itemsize == 1 else out for out in outs])
                for got, expected in zip(*results, strict=True):
                    assert torch.equal(got, expected), (dtype, n, async_op)
                kept.append([(out, out.clone()) for out in results[0]])
    for results in kept:  # nothing handed out is overwritten by later operations
        assert all(torch.equal(out, copy) for out, copy in results)
    assert ours.meter.snapshot() == c10d.meter.snapshot()
    assert {"AllgatherSdma", "All2allSdma", "AllreduceSdma"} <= set(fake.calls)


@pytest.mark.parametrize(("size", "transit_bytes"), [(1, 4096), (2, 4096), (4, 4096), (2, 64), (4, 512)])
def test_bit_for_bit_what_c10d_gives(size: int, transit_bytes: int) -> None:
    """With few bytes between ranks most transfers take several rounds."""
    run_ranks(_same_as_c10d, size, transit_bytes, timeout=60.0)


def _sum_order(rank: int, size: int) -> None:
    fake_mori()
    ours, _ = _pair(1 << 16)
    everyone = torch.randn(size, size * 40, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        parts = everyone.to(dtype)[:, rank * 40 : rank * 40 + 40].float()
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        for op, total in ((SUM, expected), (AVG, expected / size)):
            out = torch.empty(40, dtype=dtype)
            ours.reduce_scatter(out, everyone[rank].to(dtype), op)
            assert torch.equal(out, total.to(dtype))
    nan = torch.tensor([float("nan") if rank == size - 1 else 1.0, float(rank)])
    ours.all_reduce(nan, MAX)
    assert nan[0].isnan() and nan[1] == size - 1
    # Unaligned input and output: views into packed buffers.
    packed = torch.arange(64, dtype=torch.uint8)[3:11] + rank
    out = torch.zeros(size * 8 + 1, dtype=torch.uint8)
    ours.all_gather(out[1:], packed)
    assert out[1:].view(size, 8)[:, 0].tolist() == [3 + r for r in range(size)]
    double = torch.tensor([1.5 + rank], dtype=torch.float64)
    ours.all_reduce(double, SUM)  # MORI has no float64: through c10d
    assert double == 1.5 * size + sum(range(size))
    with pytest.raises(TypeError, match="holds codes"):
        ours.all_reduce(packed.clone(), SUM)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_in_rank_order_and_maxima_keep_nan(size: int) -> None:
    run_ranks(_sum_order, size)


def _sub_group(rank: int, size: int) -> None:
    """A group without global rank 0 works, and a second group of the same process is refused."""
    pair = dist.new_group([1, 2])
    if rank == 0:
        return
    fake = fake_mori(pair)
    ours = mori.MoriCollectives(pair, CPU, ByteMeter())
    out = torch.empty(2)
    ours.all_gather(out, torch.tensor([float(rank)]))
    assert out.tolist() == [1.0, 2.0]
    assert fake.calls.count("shmem_init_attr") == 1
    mori.MoriCollectives(pair, CPU, ByteMeter())
    assert fake.calls.count("shmem_init_attr") == 1
    with pytest.raises(RuntimeError, match="serves 2 ranks .*, not this group of 3"):
        mori.ensure_shmem(dist.group.WORLD, CPU)


def test_one_set_of_ranks_in_a_process() -> None:
    run_ranks(_sub_group, 3)


def _choice(rank: int, size: int) -> None:
    fake_mori()
    torch.version.hip = "7.2"
    gpu = torch.device("cuda:0")
    world = dist.group.WORLD
    mori._hardware_reason = lambda: None
    assert mori.unusable(world, CPU) == "tensors on cpu, not on a GPU"
    assert mori.unusable(world, gpu) is None
    os.environ["MORI_ENABLE_SDMA"] = "1" if rank == 0 else ""  # every rank must come to the same answer
    assert mori.unusable(world, gpu) == "MORI_ENABLE_SDMA=1 is not set (rank 1 of the group)"
    chosen, reason = collectives_for(world, "auto", gpu)
    assert chosen.name == "c10d" and "MORI_ENABLE_SDMA=1" in reason
    with pytest.raises(RuntimeError, match="MORI_ENABLE_SDMA=1 is not set"):
        collectives_for(world, "mori", gpu)
    os.environ["MORI_ENABLE_SDMA"] = "1"
    mori._node = lambda: f"node {rank}"
    assert mori.unusable(world, gpu) == f"the group spans {size} nodes"
    mori._node = lambda: f"node {rank == 1}"
    assert "not in order of nodes" in mori.unusable(world, gpu)
    mori._node = lambda: "here"
    mori.MAX_RANKS = 2
    assert "3 ranks on one node" in mori.unusable(world, gpu)
    mori.MAX_RANKS = 8
    mori._pes = (7, 8)
    assert "already serves the ranks [7, 8]" in mori.unusable(world, gpu)


def test_all_ranks_choose_alike() -> None:
    run_ranks(_choice, 3)


def _two_nodes(rank: int, size: int) -> None:
    from lumen_core.comm import hierarchical

    node = rank // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    fake_mori(groups[node])
    meter = ByteMeter()
    comm = hierarchical.mori_inside_nodes(dist.group.WORLD, CPU, meter, ["a", "a", "b", "b"])
    assert (comm.intra.name, comm.inter.name) == ("mori", "c10d")
    out, part = torch.empty(12), torch.empty(3)
    comm.all_gather(out, torch.arange(3.0) + 3 * rank)
    assert torch.equal(out, torch.arange(12.0))
    comm.reduce_scatter(part, out, SUM)
    assert torch.equal(part, 4 * (torch.arange(3.0) + 3 * rank))
    assert meter.snapshot().by_kind() == {"all_gather": 48, "reduce_scatter": 48}


def test_mori_inside_nodes_and_c10d_between() -> None:
    run_ranks(_two_nodes, 4)


def _strictness(rank: int, size: int) -> None:
    """The fake refuses what it is for."""
    fake = fake_mori()
    from mori import ccl, shmem

    with pytest.raises(SystemExit):
        shmem.shmem_mype()
    mori.ensure_shmem(dist.group.WORLD, CPU)
    os.environ["MORI_ENABLE_SDMA"] = "0"
    with pytest.raises(RuntimeError, match="MORI_ENABLE_SDMA"):
        ccl.AllgatherSdma(rank, size)
    os.environ["MORI_ENABLE_SDMA"] = "1"
    with pytest.raises(AssertionError, match="processing elements"):
        ccl.AllgatherSdma(rank, 9)
    gather = ccl.AllgatherSdma(rank, size, input_buffer_size=16, output_buffer_size=16)
    x, out = torch.zeros(8, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with pytest.raises(AssertionError, match="odd sizes"):
        gather(x.view(torch.uint8), out, 3)
    shmem.shmem_barrier_on_stream()
    with pytest.raises(AssertionError, match="larger than the transit"):
        gather(x, out, 8)
    with pytest.raises(AssertionError, match="no barrier"):
        gather(x, out, 1)
    shmem.shmem_barrier_on_stream()
    view = gather.get_output_transit_buffer()
    assert gather(x, out, 1) and view[:8].sum() == 0 and (view[8:] == fake.POISON).all()
    shmem.shmem_barrier_on_stream()
    gather.start_async(x, out, 1)
    with pytest.raises(RuntimeError, match="already in progress"):
        gather.start_async(x, out, 1)
    with pytest.raises(AssertionError, match="whatever the dtype"):
        ccl.All2allSdma(rank, size)(x.view(torch.int16), out, 1)
    with pytest.raises(ValueError, match="divisible"):
        ccl.AllreduceSdma(rank, size, dtype=torch.int32)(x, out, 3)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        ccl.AllreduceSdma(rank, size, dtype=torch.float64)


def test_the_fake_is_strict() -> None:
    assert "mori" not in sys.modules
    run_ranks(_strictness, 2)
