"""Scripts that know nothing of Lumen: Megatron's builders after `install`, and an unmodified pretrain_gpt.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpt import some

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

CHECKOUT = os.environ.get("LUMEN_MEGATRON_LM", "")
ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 1e-3 --eval-iters 1 --eval-interval 8 "
    "--log-interval 1 --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-persist-layer-norm "
    "--no-rope-fusion --attention-backend unfused --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)


def _run(command: list[str], folder: Path, seconds: float = 110.0) -> subprocess.CompletedProcess:
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)


SCRIPT = """
{first_line}
import os
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, transformer_impl="{impl}",
    normalization="RMSNorm", gradient_accumulation_fusion=False, bias_dropout_fusion=False, fp8="e4m3",
    fp8_recipe="mxfp8", attention_dropout=0.0, hidden_dropout=0.0,
)
spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
model = GPTModel(config, spec, vocab_size=64, max_sequence_length=32)
ids = torch.arange(32)[None] % 7
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(8):
    loss = model(ids, ids, torch.ones(1, 1, 32, 32).triu(1).bool(), labels=ids).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
print(sorted({{type(module).__name__ for module in model.modules()}}))
if "{impl}" == "lumen":
    from lumen_megatron import host, summary
    print(summary(model))
    host.uninstall()
    assert "Lumen" not in repr(get_gpt_layer_local_spec())
"""


@pytest.mark.parametrize("way", some(["launcher"], ["first line"]))
def test_a_script_of_megatron_core(way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(first_line="import lumen_megatron.auto" if way == "first line" else "", impl="lumen")
    )
    command = [sys.executable, *(["-m", "lumen_megatron.launcher"] if way == "launcher" else []), str(script)]
    done = _run(command, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^loss (\S+)", done.stdout, re.M)]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    for name in ("LumenColumnParallelLinear", "LumenRowParallelLinear", "LumenNorm", "LumenTransformerLayer"):
        assert name in done.stdout
    assert "8 weights quantized with mxfp8" in done.stdout
    assert "output_layer 64x64: Megatron's own layer" in done.stdout


def test_launcher_says_what_is_wrong(tmp_path: Path) -> None:
    done = _run([sys.executable, "-m", "lumen_megatron.launcher", "nowhere.py"], tmp_path)
    assert done.returncode != 0 and "nowhere.py: no such file" in done.stderr
    done = _run([sys.executable, "-m", "lumen_megatron.launcher", "--help"], tmp_path)
    assert done.returncode == 0 and "usage: lumen-megatron SCRIPT" in done.stdout


def _pretrain(ranks: int, flags: str) -> subprocess.CompletedProcess:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "lumen_megatron.launcher"]
    return _run([sys.executable, *launch, "pretrain_gpt.py", *MODEL.split(), *flags.split()], Path(CHECKOUT))


needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="LUMEN_MEGATRON_LM names no Megatron-LM checkout; pretrain_gpt.py is in no wheel"
)


@needs_checkout
@pytest.mark.parametrize(
    "ranks,flags",
    [
        (1, "--transformer-impl lumen --lumen-recipe mxfp8"),
        (1, "--transformer-impl lumen --fp8-format e4m3 --fp8-recipe mxfp8"),
        (1, "--spec lumen_megatron.spec lumen_block_spec --transformer-impl local"),
        (2, "--transformer-impl lumen --lumen-recipe mxfp8 --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--transformer-impl lumen --fp8-format hybrid --use-distributed-optimizer"),
        (2, "--transformer-impl lumen --lumen-recipe delayed --pipeline-model-parallel-size 2"),
        (2, "--transformer-impl lumen --lumen-recipe mxfp8 --context-parallel-size 2"),
        (2, "--transformer-impl lumen --lumen-recipe mxfp8 --num-experts 4 --expert-model-parallel-size 2"),
    ],
)
def test_unmodified_pretrain_gpt(ranks: int, flags: str) -> None:
    done = _pretrain(ranks, flags)
    losses = [float(x) for x in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert done.returncode == 0 and len(losses) == 8, done.stderr[-3000:]
    assert losses[-1] < losses[0] - 1.0
    assert "validation loss at iteration 8" in done.stdout
    assert "--spec" in flags or "weights quantized with" in done.stdout


@needs_checkout
def test_contradictions_stop_pretrain_gpt_before_anything_starts() -> None:
    done = _pretrain(1, "--transformer-impl lumen --lumen-recipe mxfp8 --fp8-format hybrid")
    assert done.returncode != 0 and "--lumen-recipe mxfp8 contradicts --fp8-format hybrid" in done.stderr
