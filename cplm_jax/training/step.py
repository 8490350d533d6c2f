"""The training step: one jitted, donated function with its shardings pinned on both sides."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cplm_jax.config import Config, TrainConfig
from cplm_jax.data.pipeline import Batch
from cplm_jax.models.decoder import ModelDefinition
from cplm_jax.precision import LOWEST
from cplm_jax.sharding import named_sharding, shardings
from cplm_jax.training.optimizer import learning_rate_schedule, make_optimizer

Params = dict[str, Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "optimizer", "step", "key"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that a step changes; the same structure also holds its shapes and its shardings.

    Attributes:
      params: nested dict of float32 parameters.
      optimizer: Optax state.
      step: number of updates done, int32 scalar.
      key: raw data of the random key that dropout is drawn from.
    """

    params: Params
    optimizer: Any
    step: Any
    key: Any


class StepMetrics(NamedTuple):
    """Scalars of one training step."""

    loss: Float[Array, ""]
    """Nats per target token, before the update."""
    gate: Float[Array, ""]
    """Mean weight of copying over target tokens; 0 for a baseline."""
    gradient_norm: Float[Array, ""]
    """Global norm before clipping."""
    learning_rate: Float[Array, ""]
    tokens: Int[Array, ""]
    """Target tokens of the batch."""


class _Sums(NamedTuple):
    """Sums over target tokens, which add up over the parts of a batch."""

    loss: Float[Array, ""]
    gate: Float[Array, ""]


def _objective(
    definition: ModelDefinition, train: TrainConfig, params: Params, part: Batch, dropout_key: Array | None
) -> tuple[Float[Array, ""], _Sums]:
    """Returns what one part of a batch adds to the objective: -log p of its targets, and added losses."""
    terms = definition.bind(params).target_terms(
        part.tokens, part.targets, part.segment_ids, part.positions, part.copyable, dropout_key
    )

    def total(x: Array, where: Array = part.loss_mask) -> Float[Array, ""]:
        return jnp.sum(jnp.where(where, x, 0.0))

    sums = _Sums(loss=-total(terms.log_prob), gate=total(terms.gate))
    objective = sums.loss
    if train.z_loss:
        objective = objective + train.z_loss * total(jnp.square(terms.lm_log_total))
    if train.pointer_loss:
        copied = part.loss_mask & (terms.log_copy > LOWEST)
        objective = objective - train.pointer_loss * total(terms.log_copy, copied)
    return objective, sums


def batch_gradients(
    definition: ModelDefinition, train: TrainConfig, params: Params, batch: Batch, key: Array | None
) -> tuple[Params, _Sums, Int[Array, ""]]:
    """Returns gradients, mean loss and mean gate of a batch, and its number of target tokens.

    Parts (the leading axis of every array of ``batch``) are computed one after the other. All are
    normalised by the target tokens of the whole batch, so the result does not depend on how the
    batch is cut.
    """
    gradient = jax.value_and_grad(functools.partial(_objective, definition, train), has_aux=True)
    parts = batch.tokens.shape[0]

    def one(part: Batch, index: Int[Array, ""]) -> tuple[Params, _Sums]:
        part_key = None if key is None else jax.random.fold_in(key, index)
        (_, sums), gradients = gradient(params, part, part_key)
        return gradients, sums

    if parts == 1:
        total = one(jax.tree.map(lambda x: x[0], batch), jnp.int32(0))
    else:

        def accumulate(carry: Any, xs: tuple[Batch, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, one(*xs)), None

        nothing = (jax.tree.map(jnp.zeros_like, params), _Sums(jnp.float32(0), jnp.float32(0)))
        total, _ = jax.lax.scan(accumulate, nothing, (batch, jnp.arange(parts)))
    tokens = jnp.sum(batch.loss_mask, dtype=jnp.int32)
    gradients, sums = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1).astype(x.dtype), total)
    return gradients, sums, tokens


class Trainer:
    """Compiles and holds the functions of a run on a mesh.

    Args:
      config: the whole configuration, with ``model.vocabulary_size`` resolved.
      definition: the model.
      mesh: the device mesh.
    """

    def __init__(self, config: Config, definition: ModelDefinition, mesh: Mesh):
        self.config, self.definition, self.mesh = config, definition, mesh
        self._optimizer = make_optimizer(config.optimizer, config.train.steps, definition.logical_axes)
        self._schedule = learning_rate_schedule(config.optimizer, config.train.steps)
        abstract = jax.eval_shape(self._make_state)
        replicated = NamedSharding(mesh, PartitionSpec())
        parameter_shardings = shardings(definition.logical_axes, mesh)
        self.state_shardings = TrainState(
            params=parameter_shardings,
            optimizer=optax.tree.map_params(
                self._optimizer,
                lambda _, sharding: sharding,
                abstract.optimizer,
                parameter_shardings,
                transform_non_params=lambda _: replicated,
            ),
            step=replicated,
            key=replicated,
        )
        self.abstract_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            self.state_shardings,
        )

    def _make_state(self) -> TrainState:
        init_key, dropout_key = jax.random.split(jax.random.key(self.config.seed))
        params = self.definition.init(init_key)
        return TrainState(
            params, self._optimizer.init(params), jnp.int32(0), jax.random.key_data(dropout_key)
        )

    def init(self) -> TrainState:
        """Draws the initial state, each parameter directly on the devices that hold it."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._make_state, out_shardings=self.state_shardings)()

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = None
        if self.config.model.dropout > 0:
            key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        gradients, means, tokens = batch_gradients(
            self.definition, self.config.train, state.params, batch, key
        )
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        metrics = StepMetrics(
            loss=means.loss,
            gate=means.gate,
            gradient_norm=optax.tree.norm(gradients),
            learning_rate=jnp.asarray(self._schedule(state.step), jnp.float32),
            tokens=tokens,
        )
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer, state.step + 1, state.key), metrics

    def compile_step(self) -> Any:
        """Compiles the training step ahead of time.

        Returns:
          A ``jax.stages.Compiled`` that maps (state, batch) to (state, :class:`StepMetrics`) and
          donates the state; ``memory_analysis()`` tells what it needs.
        """
        train = self.config.train
        batch_sharding = named_sharding(self.mesh, None, "batch", "length")
        shape = (
            train.accumulation,
            train.batch_size // train.accumulation,
            self.config.data.sequence_length,
        )

        def struct(name: str) -> Any:
            dtype = jnp.bool_ if name in ("copyable", "loss_mask") else jnp.int32
            return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)

        batch = Batch(*map(struct, Batch._fields))
        replicated = NamedSharding(self.mesh, PartitionSpec())
        step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, batch_sharding),
            out_shardings=(self.state_shardings, replicated),
        )
        with jax.set_mesh(self.mesh):
            return step.lower(self.abstract_state, batch).compile()
