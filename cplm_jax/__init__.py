"""cplm_jax: pretrain Copy-Paste Language Models in JAX, next to their baseline.

The names below are the package's public interface; they load on first use, so that a
mistake in a configuration is reported without waiting for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cplm_jax.config import Config, CopyHeadConfig, ModelConfig
    from cplm_jax.config_loading import load_config
    from cplm_jax.data.corpus import load_corpus
    from cplm_jax.data.tokenizer import Tokenizer
    from cplm_jax.errors import MachineError, UserError
    from cplm_jax.evaluation.comparison import compare
    from cplm_jax.evaluation.report import write_report
    from cplm_jax.evaluation.suites import evaluate
    from cplm_jax.generation import generate
    from cplm_jax.interop.export import export_orbax
    from cplm_jax.loading import LoadedModel, load_model
    from cplm_jax.mixture import TargetTerms, log_distribution, target_terms
    from cplm_jax.models.decoder import Decoder, define_model
    from cplm_jax.pointer import Candidates, Pointer
    from cplm_jax.training.loop import train

_MODULES = {
    "Candidates": "pointer",
    "Config": "config",
    "CopyHeadConfig": "config",
    "Decoder": "models.decoder",
    "LoadedModel": "loading",
    "MachineError": "errors",
    "ModelConfig": "config",
    "Pointer": "pointer",
    "TargetTerms": "mixture",
    "Tokenizer": "data.tokenizer",
    "UserError": "errors",
    "compare": "evaluation.comparison",
    "define_model": "models.decoder",
    "evaluate": "evaluation.suites",
    "export_orbax": "interop.export",
    "generate": "generation",
    "load_config": "config_loading",
    "load_corpus": "data.corpus",
    "load_model": "loading",
    "log_distribution": "mixture",
    "target_terms": "mixture",
    "train": "training.loop",
    "write_report": "evaluation.report",
}

__all__ = [
    "Candidates",
    "Config",
    "CopyHeadConfig",
    "Decoder",
    "LoadedModel",
    "MachineError",
    "ModelConfig",
    "Pointer",
    "TargetTerms",
    "Tokenizer",
    "UserError",
    "compare",
    "define_model",
    "evaluate",
    "export_orbax",
    "generate",
    "load_config",
    "load_corpus",
    "load_model",
    "log_distribution",
    "target_terms",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
