"""Checks of fields that are each valid but may not fit together."""

from cplm_jax.config import Config, DataConfig
from cplm_jax.errors import UserError


def check_combinations(config: Config) -> None:
    """Raises :class:`UserError` for fields that are each valid but do not fit together."""
    model, data, train, mesh = config.model, config.data, config.train, config.mesh
    if model.head_width is None and model.width % model.heads:
        raise UserError(
            f"model.heads = {model.heads} does not divide model.width = {model.width}; change one of "
            "them or set model.head_width"
        )
    if head_width(config) % 2:
        raise UserError(
            f"the width of an attention head is {head_width(config)}, but rotary positions need an even "
            "one; change model.width, model.heads or model.head_width"
        )
    if model.heads % model.kv_heads:
        raise UserError(
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            "each key/value head serves a whole number of query heads, so change one of them"
        )
    if train.batch_size % train.accumulation:
        raise UserError(
            f"train.accumulation = {train.accumulation} does not divide train.batch_size = "
            f"{train.batch_size}; change one of them"
        )
    sizes = {name: getattr(mesh, name) for name in ("data", "fsdp", "tensor", "sequence")}
    for name, size in sizes.items():
        if size == 0:
            raise UserError(
                f"mesh.{name} = 0: the size of an axis must be positive or -1 (all remaining devices)"
            )
    rest = [f"mesh.{name} = -1" for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise UserError(
            f"{' and '.join(rest)}: only one axis may be -1 (all remaining devices); set the others"
        )
    head = model.copy_head
    if head is not None and head.key_layer is not None and head.key_layer >= model.layers:
        raise UserError(
            f"model.copy_head.key_layer = {head.key_layer} must be below model.layers = {model.layers}; "
            "lower it, or set it to null for the last states"
        )
    _check_data(data)
    if not data.prepared and not data.validation_paths and data.validation_fraction == 0:
        raise UserError(
            "nothing is held out for validation: set data.validation_paths, or "
            "data.validation_fraction above 0"
        )
    if config.optimizer.warmup_steps >= train.steps:
        raise UserError(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} must be below "
            f"train.steps = {train.steps}; change one of them"
        )
    decay = round(config.optimizer.decay_fraction * train.steps)
    if config.optimizer.schedule == "wsd" and config.optimizer.warmup_steps + decay >= train.steps:
        raise UserError(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} and the {decay} steps of decay "
            f"(optimizer.decay_fraction = {config.optimizer.decay_fraction}) overlap in train.steps = "
            f"{train.steps}; lower one of them"
        )


def _check_data(data: DataConfig) -> None:
    raw = [name for name in ("paths", "validation_paths", "tokenizer") if getattr(data, name)]
    if data.prepared and raw:
        raise UserError(
            f"data.prepared and data.{raw[0]} are both set; prepared folders bring documents, held-out ones "
            "and the tokenizer, so leave one of the two out"
        )
    if data.weights and len(data.weights) != len(data.prepared):
        raise UserError(
            f"data.weights has {len(data.weights)} numbers for {len(data.prepared)} folders of "
            "data.prepared; give one for each, or none"
        )


def head_width(config: Config) -> int:
    """Returns the width of one attention head."""
    return config.model.head_width or config.model.width // config.model.heads
