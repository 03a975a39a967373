"""The configuration of one training job, as plain dataclasses.

This module is the schema that `lumen-train` checks every key and value against (see `launch.overrides`) and the object
every other part of `launch` receives. It imports the standard library only, so that a mistake on the command line is
reported before torch is loaded.

Where a field may be ``None`` in the YAML tree to mean "derive it", `resolve` fills it in: code behind
`launch.train.main` never sees such a ``None`` (the exceptions are documented on their fields).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lumen_core.config import QuantConfig


class ConfigError(ValueError):
    """A mistake of the user's, told in one line each; `lumen-train` prints them without a traceback.

    Any part of a run may raise it for something only the user can put right (a missing file, a wrong size).
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


LARGEST = 2**20
"""Limit of sizes and counts: far above any use, far below what overflows."""


def option(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with its documentation and what it accepts.

    ``limits``: ``choices``; ``low`` and ``high`` (inclusive); ``above`` and ``below`` (exclusive).
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass
class RopeScaling:
    """Rotary scaling, in Hugging Face's names. ``rope_type`` "default" means none."""

    rope_type: str = option("default", "rotary scaling", choices=("default", "linear", "llama3"))
    factor: float = option(1.0, "stretch of the context", low=1.0)
    low_freq_factor: float = option(1.0, "llama3: wavelengths longer than original/low are stretched", above=0.0)
    high_freq_factor: float = option(4.0, "llama3: wavelengths shorter than original/high are kept", above=0.0)
    original_max_position_embeddings: int = option(8192, "llama3: context the model was pretrained with", low=1)


@dataclass
class ModelConfig:
    """Which model: built from these numbers (Hugging Face's names), or read from the directory ``path``."""

    name: str = option("custom", "a label, used in the default run_dir")
    path: str | None = option(None, "local Hugging Face directory (config.json + safetensors); overrides the sizes")
    architecture: str = option("llama", "model family", choices=("llama", "qwen3", "qwen3_moe"))
    hidden_size: int = option(192, "width of the residual stream", low=1, high=LARGEST)
    intermediate_size: int = option(512, "width of the dense MLP", low=1, high=LARGEST)
    num_hidden_layers: int = option(6, "decoder layers", low=1, high=LARGEST)
    num_attention_heads: int = option(6, "query heads", low=1, high=LARGEST)
    num_key_value_heads: int = option(6, "key/value heads (grouped-query attention)", low=1, high=LARGEST)
    head_dim: int | None = option(None, "size of a head; null = hidden_size / num_attention_heads", low=1, high=LARGEST)
    vocab_size: int | None = option(None, "entries of the embedding; null = the tokenizer's", low=1, high=2**24)
    max_position_embeddings: int = option(2048, "longest sequence", low=1)
    rope_theta: float = option(10000.0, "rotary base", above=0.0)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = option(1e-5, "epsilon of RMSNorm", above=0.0)
    tie_word_embeddings: bool = option(False, "lm_head shares the embedding")
    attention_bias: bool = option(False, "bias in the attention projections")
    initializer_range: float = option(0.02, "standard deviation of the initial weights", above=0.0, high=1.0)
    num_experts: int = option(0, "qwen3_moe: experts per layer", low=0)
    num_experts_per_tok: int = option(0, "qwen3_moe: experts each token goes to", low=0)
    moe_intermediate_size: int = option(0, "qwen3_moe: width of one expert", low=0)
    norm_topk_prob: bool = option(True, "qwen3_moe: renormalise the chosen experts' weights")
    router_aux_loss_coef: float = option(0.001, "qwen3_moe: weight of the load-balancing loss; 0 = off", low=0.0)
    init_on_meta: bool = option(False, "build on the meta device and fill shard by shard (large models)")


@dataclass
class QuantSection:
    """The quant group: a recipe and the options that were set on top of it.

    In YAML and on the command line the options are flat (``quant.scale_rounding=even``). Their names, types and
    meanings come from `lumen_core.config` and are not repeated here; only those somebody set are in ``options``.
    """

    enabled: bool = True
    recipe: str = "mxfp8"
    options: dict[str, Any] = field(default_factory=dict)

    def to_config(self) -> QuantConfig:
        """The `QuantConfig` this section stands for; the recipe "bf16" when ``enabled`` is false.

        Raises:
            ValueError, TypeError: with the message of `lumen_core.config`.
        """
        from lumen_core.config import QuantConfig

        if not self.enabled:
            return QuantConfig.from_recipe("bf16")
        return QuantConfig.from_recipe(self.recipe, **self.options)


@dataclass
class DataConfig:
    """Which text, how it is tokenized, and how it is split."""

    train: str = option("stdlib", '"stdlib" (Python\'s own library), or files, directories, globs, joined by commas')
    validation: str | None = option(None, "as data.train; null = split validation_fraction off train, by document")
    format: str = option("auto", "file format; auto = by extension", choices=("auto", "text", "jsonl", "parquet"))
    text_key: str = option("text", "jsonl/parquet: the field that holds the text")
    tokenizer: str = option("byte", '"byte" (needs no file), or a local Hugging Face tokenizer directory')
    validation_fraction: float = option(0.05, "share of documents held out when validation is null", low=0.0, below=1.0)
    shuffle_seed: int | None = option(None, "order of the documents; null = train.seed", low=0, high=2**63 - 1)
    pack: bool = option(True, "fill sequences with consecutive documents instead of padding")
    isolate_documents: bool = option(False, "packed documents do not attend to each other")
    max_bytes: int | None = option(None, "text read at most; null = 32 MiB of stdlib, all of anything else", low=1)
    cache_dir: str | None = option(None, "where tokenized text is kept between runs; null = nowhere")


@dataclass
class OptimSchema:
    """Optimizer and learning-rate schedule."""

    name: str = option("adamw", "optimizer", choices=("adamw",))
    lr: float = option(3e-4, "peak learning rate", above=0.0)
    min_lr_ratio: float = option(0.1, "learning rate at the end, as a share of lr", low=0.0, high=1.0)
    betas: tuple[float, float] = option((0.9, 0.95), "Adam's decay rates", low=0.0, below=1.0)
    eps: float = option(1e-8, "Adam's epsilon", above=0.0)
    weight_decay: float = option(0.1, "decoupled weight decay (matrices only)", low=0.0)
    warmup_steps: int | None = option(None, "linear warm-up; null = a tenth of max_steps, at most 100", low=0)
    schedule: str = option("cosine", "after the warm-up", choices=("cosine", "linear", "constant"))
    state: str = option("fp32", "how the optimizer keeps its moments", choices=("fp32", "int8", "fp8"))
    master_weights: str = option(
        "auto", "fp32 copy of the weights; auto = when parameters are bf16", choices=("auto", "true", "false")
    )


@dataclass
class BackendConfig:
    """What distributes the model."""

    name: str = option("fsdp2", "host", choices=("fsdp2",))
    device: str = option("auto", "auto = cuda (also ROCm's name) when there is one", choices=("auto", "cpu", "cuda"))
    reshard_after_forward: bool = option(True, "free gathered weights between forward and backward")
    reduce_dtype: str = option("fp32", "precision of the gradient reduction", choices=("fp32", "bf16"))
    low_precision_all_gather: bool = option(
        True, "send weights as the recipe quantizes them; false = in train.dtype, quantized after they arrived"
    )
    all_gather_mode: str = option(
        "auto",
        "which blocks of a 1x32 weight travel: row = fprop's, on-demand = the coming pass's, all = both; auto = row",
        choices=("auto", "on-demand", "all", "row"),
    )
    wire: str | None = option(
        None, "recipe whose weights are sent, where it is not the quant group's; bf16 = not quantized; null = the same"
    )
    collectives: str = option(
        "auto",
        "c10d = NCCL, RCCL or gloo, mori = MORI-CCL; auto = MORI where it can run",
        choices=("auto", "c10d", "mori"),
    )
    low_precision_reduce_scatter: bool = option(False, "send gradients in FP8 with a scale per 128 values")
    shard_placement: str | None = option(
        None, "how banks of experts are cut; null = between experts, too", choices=("shard_by_dim_0",)
    )


@dataclass
class TrainLoopConfig:
    """The loop: how long, how large, how precise, how often to look."""

    max_steps: int = option(1000, "optimizer steps", low=1)
    micro_batch_size: int = option(8, "sequences per rank and forward pass", low=1, high=LARGEST)
    global_batch_size: int | None = option(
        None, "sequences per step; null = micro_batch_size x ranks", low=1, high=LARGEST
    )
    seq_length: int = option(256, "tokens per sequence", low=1, high=2**24)
    seed: int = option(0, "initialisation, data order and rounding noise", low=0, high=2**63 - 1)
    dtype: str = option("bf16", "precision outside the quantized GEMMs", choices=("bf16", "fp32"))
    grad_clip: float = option(1.0, "largest gradient norm; 0 = no clipping", low=0.0)
    eval_interval: int = option(100, "steps between evaluations; 0 = at the end only", low=0)
    eval_batches: int = option(16, "global batches per evaluation; 0 = no evaluation", low=0)
    log_interval: int = option(10, "steps between log lines (and host synchronisations)", low=1)
    max_nonfinite_steps: int = option(10, "stop after this many skipped steps", low=1)
    activation_checkpointing: bool = option(False, "recompute each layer in the backward pass")
    compile: bool = option(False, "torch.compile each layer")


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which one a run starts from."""

    interval: int = option(500, "steps between checkpoints; 0 = none on the way", low=0)
    keep: int = option(3, "newest checkpoints kept; 0 = all", low=0)
    resume: str = option("auto", '"auto" (newest in run_dir, if any), "never", or a checkpoint directory')
    save_at_end: bool = option(True, "write one after the last step")


@dataclass
class TrainConfig:
    """Everything `launch.loop.run` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    quant: QuantSection = field(default_factory=QuantSection)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimSchema = field(default_factory=OptimSchema)
    backend: BackendConfig = field(default_factory=BackendConfig)
    train: TrainLoopConfig = field(default_factory=TrainLoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run_dir: str | None = option(None, "where everything is written; null = runs/<model>-<quant>")
    compare: str | None = option(None, 'recipe trained beside, with the same data and seed (usually "bf16")')
    export: str | None = option(None, "directory the final weights are exported to, in Hugging Face format")


def resolve(cfg: TrainConfig, world_size: int = 1) -> TrainConfig:
    """A copy of ``cfg`` with every derived value filled in.

    Fills ``run_dir``, ``train.global_batch_size``, ``optim.warmup_steps``, ``data.shuffle_seed`` and
    ``model.head_dim``. ``model.vocab_size`` stays ``None`` (only the tokenizer knows), as do ``model.path``,
    ``data.validation``, ``compare`` and ``export`` where unset.
    """
    cfg = copy.deepcopy(cfg)
    if cfg.train.global_batch_size is None:
        cfg.train.global_batch_size = cfg.train.micro_batch_size * world_size
    if cfg.optim.warmup_steps is None:
        cfg.optim.warmup_steps = min(100, cfg.train.max_steps // 10)
    if cfg.data.shuffle_seed is None:
        cfg.data.shuffle_seed = cfg.train.seed
    if cfg.model.head_dim is None:
        cfg.model.head_dim = cfg.model.hidden_size // cfg.model.num_attention_heads
    if cfg.run_dir is None:
        cfg.run_dir = f"runs/{_word(cfg.model.name)}-{_word(_recipe_label(cfg.quant))}"
    return cfg


def _recipe_label(quant: QuantSection) -> str:
    """Recipe and options in one word: runs that differ in them must not resume each other by default."""
    config = quant.to_config()
    if config.reduce_amax:  # part of what the group's files for delayed and hybrid are, and says nothing more
        config = config.replace(reduce_amax=False)
    return str(config)


def _word(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text.lower()).strip("-") or "run"
