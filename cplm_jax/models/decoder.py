"""The decoder-only transformer, with its LM head and optional copy head."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from cplm_jax.config import ModelConfig
from cplm_jax.mixture import TargetTerms, target_terms
from cplm_jax.models.attention import Attention, attend
from cplm_jax.models.copy_head import CopyHead
from cplm_jax.models.layers import RMSNorm, SwiGLU, dropout, parameter
from cplm_jax.pointer import Pointer
from cplm_jax.precision import einsum_float32
from cplm_jax.sharding import constrain


class Outputs(NamedTuple):
    """What the two heads say about a batch."""

    logits: Float[Array, "batch length vocabulary"]
    """LM-head logits z, float32."""
    pointer: Pointer | None
    """What the copy head says; ``None`` for a baseline."""


class States(NamedTuple):
    """The decoder's states, from which both heads start, in the compute dtype."""

    hidden: Float[Array, "batch length width"]
    """h, after the final norm."""
    key_source: Float[Array, "batch length width"]
    """The states that copy keys are made from: h, or those after block ``copy_head.key_layer``."""


Attend = Callable[[Array, Array, Array, Array, Any], tuple[Array, Any]]
"""Maps queries, keys, values, the layer's index and a memory to what the heads gather and the new memory."""


class Block(nnx.Module):
    """Pre-norm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        head_width = config.head_width or config.width // config.heads
        residual_scale = (2 * config.layers) ** -0.5  # keeps the residual stream's variance at depth
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(
            config.width,
            config.heads,
            config.kv_heads,
            head_width,
            config.rope_theta,
            residual_scale,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
        self.mlp = SwiGLU(config.width, config.mlp_width, residual_scale, rngs=rngs)
        self.dropout = config.dropout

    def __call__(
        self,
        x: Array,
        positions: Array,
        attention: Attend,
        layer: Array,
        memory: Any = None,
        key: Array | None = None,
    ) -> tuple[Array, Any]:
        """Maps (batch, length, width) to the same, and the memory to a new one.

        Args:
          x: the residual stream.
          positions: of each token in its document.
          attention: gathers values for queries.
          layer: index of the block.
          memory: what ``attention`` carries from block to block.
          key: draws the dropout.
        """
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        projected = self.attention.project(self.attention_norm(x), positions)
        mixed, memory = attention(*projected, layer, memory)
        x = x + dropout(self.attention.merge(mixed), self.dropout, attention_key)
        x = x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, mlp_key)
        return constrain(x, "batch", "length", None), memory


class Decoder(nnx.Module):
    """A Llama-like language model (Touvron et al. 2023), with or without a copy head.

    Blocks are stacked along a leading axis and scanned, so that compile time does not grow
    with depth. Random streams: ``params`` for everything the baseline has, ``copy_head`` for
    the rest, so that shared parameters start alike with and without a copy head.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.vocabulary_size is None:
            raise ValueError("model.vocabulary_size must be set to build a model")
        self.config = config
        shape = (config.vocabulary_size, config.width)
        axes = ("vocabulary", "embed")
        self.embedding = parameter(rngs.params(), shape, axes, config.width**-0.5)
        self.lm_head = (
            None if config.tied_embeddings else parameter(rngs.params(), shape, axes, config.width**-0.5)
        )
        block = functools.partial(Block, config)
        self.blocks = nnx.vmap(lambda keys: block(rngs=nnx.Rngs(params=keys)), in_axes=0, out_axes=0)(
            jax.random.split(rngs.params(), config.layers)
        )
        self.final_norm = RMSNorm(config.width, config.norm_epsilon)
        self.copy_head = (
            None
            if config.copy_head is None
            else CopyHead(config.copy_head, config.width, config.norm_epsilon, rngs=rngs)
        )

    @property
    def lm_matrix(self) -> Float[Array, "vocabulary width"]:
        """W, the LM head's matrix."""
        return self.embedding[...] if self.lm_head is None else self.lm_head[...]

    def embed(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """Returns the residual stream before the first block, in the compute dtype."""
        dtype = jnp.dtype(self.config.compute_dtype)
        # Gathered over the parameters' split before the lookup, whose result is split over the batch.
        table = constrain(self.embedding[...], "vocabulary", None)
        # Looked up in float32: the gradient of a frequent token is a sum of thousands of terms. Scaled
        # to unit variance, whatever the width, from an embedding that a tied LM head can use too.
        x = (table[tokens] * self.config.width**0.5).astype(dtype)
        return constrain(x, "batch", "length", None)

    def run_blocks(
        self,
        x: Float[Array, "batch length width"],
        positions: Int[Array, "batch length"],
        attention: Attend,
        memory: Any = None,
        dropout_key: Array | None = None,
    ) -> tuple[States, Any]:
        """Runs all blocks.

        Args:
          x: what :meth:`embed` returns.
          positions: position of each token in its document.
          attention: see :class:`Block`.
          memory: what ``attention`` is given in the first block.
          dropout_key: draws the dropout; ``None`` for evaluation.

        Returns:
          The states, and the memory after the last block.
        """
        config = self.config
        graph, stacked = nnx.split(self.blocks)
        keys = None if dropout_key is None else jax.random.split(dropout_key, config.layers)
        key_layer = None if config.copy_head is None else config.copy_head.key_layer

        def block(x: Array, memory: Any, layer: Array, state: Any, key: Array | None) -> tuple[Array, Any]:
            return nnx.merge(graph, state)(x, positions, attention, layer, memory, key)

        if config.rematerialize:
            block = jax.checkpoint(block, prevent_cse=False)  # inside a scan CSE cannot undo it

        def body(carry: tuple[Array, Array, Any], xs: Any) -> tuple[tuple[Array, Array, Any], None]:
            x, early, memory = carry
            x, memory = block(x, memory, *xs)
            if key_layer is not None:
                early = jnp.where(xs[0] == key_layer - 1, x, early)
            return (x, early, memory), None

        early = jnp.zeros_like(x) if key_layer is not None else jnp.zeros((), x.dtype)
        xs = (jnp.arange(config.layers), stacked, keys)
        (x, early, memory), _ = jax.lax.scan(body, (x, early, memory), xs)
        hidden = self.final_norm(x)
        return States(hidden, hidden if key_layer is None else early), memory

    def states(
        self,
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
        dropout_key: Array | None = None,
    ) -> States:
        """Returns the states that both heads start from.

        Args:
          tokens: token ids, each below the vocabulary size.
          segment_ids: document of each position; 0 is padding. Documents do not see each other.
          positions: position of each token in its document.
          dropout_key: draws the dropout; ``None`` for evaluation.
        """

        def attention(query: Array, key: Array, value: Array, _: Array, memory: None) -> tuple[Array, None]:
            return attend(query, key, value, segment_ids, self.config.attention_block), memory

        states, _ = self.run_blocks(self.embed(tokens), positions, attention, dropout_key=dropout_key)
        return states

    def pointer(
        self,
        states: States,
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        copyable: Bool[Array, "batch length"],
    ) -> Pointer | None:
        """Returns what the copy head says; ``None`` for a baseline.

        Args:
          states: what :meth:`states` returns.
          tokens: as for :meth:`states`.
          segment_ids: likewise.
          copyable: whether a position holds an ordinary token (no BOS, EOS or PAD).
        """
        if self.copy_head is None:
            return None
        candidates = self.copy_head.candidates(states.key_source, tokens, segment_ids, copyable)
        return self.copy_head.point(states.hidden, segment_ids, candidates)

    def logits(self, hidden: Float[Array, "batch length width"]) -> Float[Array, "batch length vocabulary"]:
        """Returns the LM head's logits z, float32."""
        z = einsum_float32("btd,vd->btv", hidden, self.lm_matrix.astype(hidden.dtype))
        return constrain(z, "batch", "length", "vocabulary")

    def target_terms(
        self,
        tokens: Int[Array, "batch length"],
        targets: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
        copyable: Bool[Array, "batch length"],
        dropout_key: Array | None = None,
    ) -> TargetTerms:
        """Returns the log-probability of each target and its parts, by the loss path.

        Args are those of :meth:`states` and :meth:`pointer`, and ``targets``, the token that follows each
        position.
        """
        states = self.states(tokens, segment_ids, positions, dropout_key)
        pointer = self.pointer(states, tokens, segment_ids, copyable)
        return target_terms(states.hidden, self.lm_matrix, targets, pointer, self.config.logit_chunk)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
        copyable: Bool[Array, "batch length"],
    ) -> Outputs:
        """Returns the whole outputs of both heads, for :func:`cplm_jax.mixture.log_distribution`.

        Args are those of :meth:`states` and :meth:`pointer`.
        """
        states = self.states(tokens, segment_ids, positions)
        return Outputs(self.logits(states.hidden), self.pointer(states, tokens, segment_ids, copyable))


class ModelDefinition(NamedTuple):
    """A model without values: what turns a nested dict of arrays into a :class:`Decoder`."""

    config: ModelConfig
    graph: Any
    template: Any
    """``nnx.State`` of shapes."""
    shapes: dict[str, Any]
    """Nested dict of ``jax.ShapeDtypeStruct``."""
    logical_axes: dict[str, Any]
    """Nested dict, the same keys, of tuples of logical axis names."""

    def bind(self, params: dict[str, Any]) -> Decoder:
        """Returns the model with these parameters; cheap, and usable inside ``jax.jit``."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graph, state)

    def init(self, key: Array) -> dict[str, Any]:
        """Draws initial parameters. The same key gives the same shared ones with and without a copy head."""
        return nnx.to_pure_dict(nnx.state(_build(self.config, key), nnx.Param))


def _build(config: ModelConfig, key: Array) -> Decoder:
    params_key, copy_key = jax.random.split(key)
    return Decoder(config, rngs=nnx.Rngs(params=params_key, copy_head=copy_key))


def define_model(config: ModelConfig) -> ModelDefinition:
    """Describes the model of a configuration without computing or allocating anything."""
    abstract = nnx.eval_shape(lambda: _build(config, jax.random.key(0)))
    graph, template = nnx.split(abstract)
    axes: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(template):
        *parents, leaf = (str(p) for p in path)
        node = axes
        for parent in parents:
            node = node.setdefault(parent, {})
        stacked = path[0] == "blocks"
        node[leaf] = ("layers", *variable.logical_axes) if stacked else tuple(variable.logical_axes)
    return ModelDefinition(config, graph, template, nnx.to_pure_dict(template), axes)


def parameter_count(shapes: dict[str, Any]) -> int:
    """Returns the number of parameters of a nested dict of arrays or shapes."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(shapes))
