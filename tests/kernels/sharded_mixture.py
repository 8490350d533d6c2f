"""Prints, as JSON, how far both paths of the mixture on meshes of 8 fake devices are from the reference.

Started by :func:`tests.fake_devices.run_on_devices` as
``python -m tests.kernels.sharded_mixture``.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from cplm_jax import mixture
from cplm_jax.config import MeshConfig
from cplm_jax.double_word import DoubleWord
from cplm_jax.kernels.scatter import logsumexp_by_token, sum_by_token
from cplm_jax.pointer import Pointer
from cplm_jax.sharding import make_mesh, named_sharding
from tests import reference
from tests.test_mixture import make_case, pointer_of

MESHES = {
    "data=8": {"data": 8},
    "tensor=8": {"data": 1, "tensor": 8},
    "sequence=8": {"data": 1, "sequence": 8},
    "data=2, fsdp=2, tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp=2, tensor=2, sequence=2": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
}
SHAPE = (8, 16, 24, 2)  # batch, length, vocabulary, pointers: every mesh divides them
LOGICAL = {
    "hidden": ("batch", "length", None),
    "matrix": ("vocabulary", "embed"),
    "query": ("batch", "length", None, None),
    "key": ("batch", "length", None, None),
    "gate_term": ("batch", "length", None),
}


def place(case, mesh):
    def one(name, value):
        axes = LOGICAL.get(name, ("batch", "length") if value.shape == SHAPE[:2] else ())
        return jax.device_put(value, named_sharding(mesh, *axes))

    return {name: one(name, value) for name, value in case.items()}


def value_and_gradients(case, gate, path, cuts):
    """Log-probabilities, of the targets or of every token, and gradients by one path."""

    def loss(inputs):
        pointer = pointer_of(inputs, case, gate, cuts[1])
        if path == "loss":
            terms = mixture.target_terms(
                inputs["hidden"], inputs["matrix"], case["targets"], pointer, cuts[0]
            )
            return -jnp.sum(case["weights"] * terms.log_prob), terms.log_prob
        logits = jnp.einsum("btd,vd->btv", inputs["hidden"], inputs["matrix"], precision="highest")
        log_p = mixture.log_distribution(logits, pointer, method=path)
        picked = jnp.take_along_axis(log_p, case["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(case["weights"] * picked), log_p

    inputs = {n: case[n] for n in reference.INPUTS if n in case}
    (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
    return values, gradients


def error(actual, expected):
    """Largest deviation, relative to the size of the array's values (at least 1)."""
    size = max(1.0, np.abs(expected).max())
    return float(np.abs(np.asarray(actual, np.float64) - expected).max() / size)


def errors(mesh, gate):
    case = make_case(7, SHAPE, documents="several", copyable=0.7, recency=0.5)
    log_p, _, gradients = reference.mixture(case, gate)
    targets = np.take_along_axis(log_p, case["targets"][..., None], -1)[..., 0]
    worst = {}
    for path in ("loss", "segment_sum", "one_hot"):
        with jax.set_mesh(mesh):
            run = jax.jit(value_and_gradients, static_argnums=(1, 2, 3))
            values, actual = jax.device_get(run(place(case, mesh), gate, path, (5, 4)))
        worst[path] = error(values, targets if path == "loss" else log_p)
        for name, gradient in gradients.items():
            worst[f"{path}, gradient of {name}"] = error(actual[name], gradient)
    return worst


def scatter_errors(mesh):
    """Of both scatters against ``np.add.at``, and of their gradients."""
    rng = np.random.default_rng(0)
    batch, length, vocabulary = 8, 16, 24
    values = rng.standard_normal((batch, length, length))
    valid = rng.random(values.shape) < 0.6
    tokens = rng.integers(0, vocabulary, (batch, length), dtype=np.int32)
    weights = rng.standard_normal((batch, length, vocabulary))
    at = (np.arange(batch)[:, None, None], np.arange(length)[:, None], tokens[:, None, :])

    def added(x):
        total = np.zeros(weights.shape)
        np.add.at(total, at, np.where(valid, x, 0.0))
        return total

    lost = rng.uniform(-0.5, 0.5, values.shape).astype(np.float32)
    weight = np.exp(values + lost)
    mass = added(weight)
    present = mass > 0
    results = {
        "sum": (sum_by_token, added(values), np.where(valid, weights[at], 0.0)),
        "logsumexp": (
            lambda values, *args: logsumexp_by_token(DoubleWord(values, lost), *args),
            np.where(present, np.log(np.where(present, mass, 1.0)), 0.0),
            np.where(valid, weights[at] * weight / np.where(valid, mass[at], 1.0), 0.0),
        ),
    }
    worst = {}
    for name, (function, expected, gradient) in results.items():
        for method in ("segment_sum", "one_hot"):

            def loss(values, method=method, function=function):
                result = function(values, valid, tokens, vocabulary, method)
                if isinstance(result, DoubleWord):
                    result = result.value
                result = jnp.where(present, result, 0.0)
                return jnp.sum(weights * result), result

            with jax.set_mesh(mesh):
                (_, actual), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(
                    values.astype(np.float32)
                )
            worst[f"{name} by {method}"] = error(actual, expected)
            worst[f"{name} by {method}, gradient"] = error(found, gradient)
    return worst


def collectives(mesh, gate):
    """Which collectives the forward pass of the distribution compiles to, its inputs split as they come.

    Candidates are split over ``sequence``, the queries are not.
    """
    case = make_case(7, SHAPE, documents="several", copyable=0.7, recency=0.5)
    logits = np.zeros((*SHAPE[:2], SHAPE[2]), np.float32)
    pointer = pointer_of(case, case, gate)
    split, whole = named_sharding(mesh, "batch", "length"), named_sharding(mesh, "batch")
    replicated = named_sharding(mesh)
    shardings = Pointer(
        query=whole,
        gate_term=whole,
        segment_ids=whole,
        candidates=jax.tree.map(lambda _: split, pointer.candidates),
        recency=replicated,
        confidence=None if pointer.confidence is None else replicated,
        gate=gate,
    )
    of_logits = named_sharding(mesh, "batch", None, "vocabulary")

    def forward(logits, pointer):
        return mixture.log_distribution(logits, pointer, method="segment_sum")

    with jax.set_mesh(mesh):
        jitted = jax.jit(forward, in_shardings=(of_logits, shardings), out_shardings=of_logits)
        text = jitted.lower(logits, pointer).compile().as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return [name for name in names if name in text]


if __name__ == "__main__":
    result = {}
    for name, sizes in MESHES.items():
        mesh = make_mesh(MeshConfig(**sizes))
        gates = ("confidence", "context_logits") if name.startswith("fsdp") else ("confidence",)
        result[name] = {
            "errors": {gate: errors(mesh, gate) for gate in gates},
            "scatter": scatter_errors(mesh),
            "collectives": {gate: collectives(mesh, gate) for gate in ("confidence", "shared_softmax")},
        }
    print(json.dumps(result))
