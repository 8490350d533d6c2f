"""AdamW with a decay mask, its learning-rate schedules and gradient clipping, all from Optax."""

from typing import Any

import jax
import optax

from cplm_jax.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates done.

    Linear warm-up, then cosine decay, or a stable phase and linear decay ("WSD", Hu et al. 2024).
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate
    # The first update is at rate peak / (warmup + 1), not 0.
    warmup = optax.linear_schedule(peak / (config.warmup_steps + 1), peak, max(config.warmup_steps, 1))
    remaining = steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(remaining - 1, 1), alpha=config.final_learning_rate)
    else:
        decay = round(config.decay_fraction * steps)
        after = optax.linear_schedule(peak, final, decay, transition_begin=remaining - 1 - decay)
    if config.warmup_steps == 0:
        return after
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decay_mask(logical_axes: Any) -> Any:
    """Returns which parameters are decayed: matrices, not norms, biases or vectors (stacked or not).

    A vector for each layer or pointer is no matrix.
    """

    def is_matrix(axes: tuple[str | None, ...]) -> bool:
        return len([a for a in axes if a not in ("layers", "pointers")]) >= 2

    return jax.tree.map(is_matrix, logical_axes, is_leaf=lambda x: isinstance(x, tuple))


def make_optimizer(config: OptimizerConfig, steps: int, logical_axes: Any) -> optax.GradientTransformation:
    """Builds the optimizer.

    Args:
      config: the ``optimizer`` section.
      steps: length of the run, for the schedule.
      logical_axes: logical axes of every parameter, for the decay mask.
    """
    clip = (
        optax.identity() if config.gradient_clip is None else optax.clip_by_global_norm(config.gradient_clip)
    )
    return optax.chain(
        clip,
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask(logical_axes),
        ),
    )
