"""The configuration: one tree of documented dataclasses, filled by YAML files and flags.

Every field has a docstring that says what it does to the run; ``--help`` prints
them. Loading and merging live in :mod:`cplm_jax.config_loading`.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def _fits_float32(value: float) -> float:
    if value != 0 and not 1.2e-38 < abs(value) < 3.4e38:
        raise ValueError("the number is beyond the range of float32")
    return value


Number = Annotated[float, AfterValidator(_fits_float32)]
# Sizes and counts end up in 32-bit shapes and counters.
Positive = Annotated[int, Field(gt=0, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
AxisSize = Annotated[int, Field(ge=-1, lt=2**31)]


def check_path(value: str) -> str:
    """Returns ``value``. Raises :class:`ValueError` if it can name no file."""
    if not value:
        raise ValueError("the path is empty")
    if "\0" in value:
        raise ValueError("a path cannot contain a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:
        raise ValueError("the path is not UTF-8 text") from e
    try:
        Path(value).expanduser()
    except RuntimeError as e:
        raise ValueError("the home folder it starts with does not exist") from e
    return value


def check_local_path(value: str) -> str:
    """Returns ``value``. Raises :class:`ValueError` if it can name no file of this machine."""
    if "://" in value:
        raise ValueError("a URL, but a path on this machine is needed; mount the bucket, or copy the files")
    return check_path(value)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(check_local_path)]
PathOrUrl = Annotated[str, AfterValidator(check_path)]
Paths = Annotated[list[PathText], BeforeValidator(_listed)]
PathsOrUrls = Annotated[list[PathOrUrl], BeforeValidator(_listed)]


@dataclass(frozen=True, config=_STRICT)
class CopyHeadConfig:
    """The copy head (``model.copy_head: null`` is the baseline without one)."""

    gate: Literal[
        "learned", "sentinel", "shared_softmax", "confidence", "context_logits", "context_logits_sum"
    ] = "shared_softmax"
    """Expression of the gate logit that weighs copying against the LM head: `learned` is a
    linear function of the state, `sentinel` compares the pointer with a learned vector,
    `shared_softmax` puts copy scores and logits under one softmax, `confidence` is `learned` plus
    learned multiples of the pointer's log-sum-exp and entropy. The other two are no gates but another
    mixture, slower, for comparison: `context_logits` adds the log-sum-exp, `context_logits_sum` the sum,
    of a token's copy scores to its logit before a single softmax."""
    alignment: Literal["preceding", "containing", "both"] = "both"
    """State from which a candidate token's key is made: `preceding`, the one that predicted
    it; `containing`, the one that has read it; `both`, the sum of two projections."""
    pointers: Positive = 1
    """Number P of pointers, each with its own queries, keys and gate logit; the gate is a softmax
    over the LM head and the pointers."""
    width: Positive = 64
    """Width C of each pointer's queries and keys."""
    normalize: bool = True
    """Whether queries and keys are scaled to length 1, and scores by a learned temperature."""
    recency_bias: bool = False
    """Whether scores lose a learned multiple (positive, one per pointer) of the distance in tokens."""
    key_layer: Positive | None = None
    """Block whose output keys are made from, below `model.layers`; null takes the last states, after the
    final norm. Queries always come from those."""
    gate_bias: Number = -1.0
    """Initial bias of the gate logit (all gates but `sentinel`), or of the copy scores that
    `context_logits` adds; below 0 favours the LM head at the start."""
    score_block: Positive | None = None
    """Positions in a block of queries and of candidates whose copy scores exist at a time in the
    training loss; null chooses by batch and length. Does not change the result beyond rounding. The
    `context_logits` go by `model.logit_chunk` instead."""


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """The decoder: RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    vocabulary_size: Positive | None = None
    """Number of token ids V; null takes the tokenizer's. A larger value pads the vocabulary."""
    width: Positive = 128
    """Width D of the residual stream."""
    layers: Positive = 4
    """Number of blocks."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Positive = 2
    """Number of key/value heads; must divide `heads`."""
    head_width: Positive | None = None
    """Width of one attention head (even); null takes width / heads."""
    mlp_width: Positive = 384
    """Inner width of the SwiGLU MLP."""
    tied_embeddings: bool = True
    """Whether the LM head uses the embedding matrix."""
    rope_theta: Annotated[Number, Field(gt=1)] = 10_000.0
    """Base of the rotary position frequencies."""
    norm_epsilon: Annotated[Number, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping an element of each attention and MLP output in training."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products. Parameters, log-sum-exps, losses and gradients
    of parameters stay float32."""
    rematerialize: bool = False
    """Whether the backward pass recomputes each block instead of storing its activations."""
    attention_block: Positive | None = None
    """Queries whose attention scores exist at a time on a device; null chooses by batch, heads and
    length. Does not change the result beyond rounding."""
    logit_chunk: Positive | None = None
    """Tokens whose logits exist at a time on a device in the training loss; null takes as many as 128 MiB
    of logits hold. Does not change the result beyond rounding."""
    copy_head: CopyHeadConfig | None = field(default_factory=CopyHeadConfig)
    """The copy head; null for the baseline."""


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """The corpus, its tokenizer and how documents are packed."""

    prepared: Paths = field(default_factory=list)
    """Folders that `cplm prepare` made, the sources to train on, all with one tokenizer; what they hold
    out is held out. In place of `paths` and the tokenizer."""
    weights: list[Annotated[Number, Field(gt=0)]] = field(default_factory=list)
    """Share of the training rows that each folder of `prepared` gives; they need not add up to 1. Empty
    takes each in proportion to its tokens, so that their epochs end together."""
    paths: PathsOrUrls = field(default_factory=list)
    """Documents to train on, if not `prepared`: files, folders, globs or URLs that fit on this disk. A
    `.jsonl` file holds a document a line, `.parquet` and `.arrow` files a document a row, any other file
    is one document of UTF-8 text; `.gz` and `.zst` are decompressed. `python:stdlib` stands for the
    source of the running Python's standard library, without its tests."""
    validation_paths: PathsOrUrls = field(default_factory=list)
    """Held-out documents; if empty, `validation_fraction` of `paths` is held out."""
    validation_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """Share of the documents of `paths` held out by a hash of their text, so that equal documents are on
    one side, and stay there. Not used with `validation_paths`."""
    text_field: str = "text"
    """Field of a JSONL record, or column of a table, that holds the text."""
    tokenizer: PathText | None = None
    """A sentencepiece model or a Hugging Face `tokenizer.json`; null trains a BPE model on the training
    documents, or takes that of `prepared`."""
    tokenizer_vocabulary_size: Annotated[int, Field(ge=300, lt=2**31)] = 4096
    """Pieces of the tokenizer that is trained when `tokenizer` is null."""
    tokenizer_sample_bytes: Annotated[int, Field(gt=0, lt=2**63)] = 100_000_000
    """Bytes of training text, from the start of the corpus, that a tokenizer is trained on."""
    sequence_length: Annotated[int, Field(ge=2, lt=2**31)] = 256
    """Length T of a packed row, in tokens."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How training documents are laid into rows: `concatenate` end to end, cut every T tokens, without
    padding; `best_fit` whole where they fit, with a little padding."""
    cache_dir: PathText = "~/.cache/cplm_jax"
    """Folder for trained tokenizers and tokenised documents, keyed by content."""
    prefetch: NonNegative = 4
    """Batches prepared ahead of the training step; 0 prepares each when it is asked for."""
    workers: NonNegative = 0
    """Processes that prepare batches; 0 leaves it to threads of the training process, which is enough for
    some million tokens/s. Does not change the batches."""


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """AdamW, its schedule and gradient clipping."""

    learning_rate: Annotated[Number, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: `cosine` decays to the end; `wsd` (warm-up-stable-decay) stays at the peak
    and decays linearly over the last `decay_fraction` of the steps."""
    warmup_steps: NonNegative = 20
    """Steps of linear warm-up; the first update is at peak / (warmup_steps + 1)."""
    decay_fraction: Fraction = 0.2
    """Share of `train.steps`, at the end, in which `wsd` decays; 0 stays at the peak."""
    final_learning_rate: Fraction = 0.1
    """Learning rate at the last step, as a share of the peak."""
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the gradient's running mean."""
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the squared gradient's running mean."""
    epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    """Added to the denominator of Adam's update."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms, biases and vectors are not decayed."""
    gradient_clip: Annotated[Number, Field(gt=0)] | None = 1.0
    """Global norm to which gradients are clipped; null does not clip."""


@dataclass(frozen=True, config=_STRICT)
class MeshConfig:
    """Sizes of the device mesh's axes; their product is the number of devices used."""

    data: AxisSize = -1
    """Replicas of the parameters; the batch is split. One axis may be -1: all remaining devices."""
    fsdp: AxisSize = 1
    """Ways in which parameters, optimizer state and the batch are split."""
    tensor: AxisSize = 1
    """Ways in which heads, MLP and vocabulary are split."""
    sequence: AxisSize = 1
    """Ways in which the context is split; must divide `data.sequence_length`."""
    distributed: bool = False
    """Whether several processes form the mesh (a TPU pod, Slurm or MPI job, or processes started
    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set)."""


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    """Orbax checkpoints."""

    every: Positive = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 2
    """Number of latest checkpoints kept."""
    allow_changed_config: bool = False
    """Whether a run may go on although fields that change its result, or its corpus, changed."""


@dataclass(frozen=True, config=_STRICT)
class EvaluationConfig:
    """Validation during training."""

    every: Positive = 100
    """Steps between validations; the last step is always validated."""
    batches: Positive | None = None
    """Number of validation batches, whose rows are spread evenly over the held-out text; null uses
    every held-out token once."""
    batch_size: Positive = 16
    """Rows of a validation batch."""


@dataclass(frozen=True, config=_STRICT)
class LoggingConfig:
    """What a run writes besides checkpoints."""

    every: Positive = 10
    """Steps between training rows of metrics.jsonl."""
    tensorboard: bool = True
    """Whether the same rows are written to RUN/tensorboard."""


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """Length of the run and size of a batch."""

    steps: Positive = 1000
    """Number of optimizer steps."""
    batch_size: Positive = 16
    """Packed rows in one optimizer step, over all devices and accumulation steps."""
    accumulation: Positive = 1
    """Parts in which a batch is computed one after the other; gradients are those of the whole
    batch, normalised by its number of target tokens."""
    z_loss: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of an added loss, the mean square of the logits' log-sum-exp (PaLM, Chowdhery et al.
    2022), which keeps logits small; 0 for none. The reported `loss` is without it."""
    pointer_loss: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of an added loss, the mean of -log p_copy over targets that occur among the valid
    candidates (normalised by all targets), which teaches the pointers whatever the gate does; 0 for
    none. The reported `loss` is without it; a baseline has none."""


@dataclass(frozen=True, config=_STRICT)
class Config:
    """A training run."""

    run_dir: PathText | None = None
    """Folder of the run (configuration, tokenizer, metrics, checkpoints). Running the same
    command again continues what is there."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial values, data order and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# Fields that cannot change what is learned (beyond float rounding, for the mesh), so a run may
# change them when it goes on.
FREE_TO_CHANGE = (
    "run_dir",
    "mesh",
    "model.attention_block",
    "model.logit_chunk",
    "model.copy_head.score_block",
    "checkpoint",
    "logging",
    "evaluation.every",
    "evaluation.batch_size",
    "data.cache_dir",
    "data.prefetch",
    "data.workers",
    "data.prepared",  # the documents themselves are compared, by content
    "data.paths",
    "data.validation_paths",
    "data.tokenizer",  # likewise: the tokenizer itself is compared
)
