"""The part of a VllmConfig that the plugin looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

SIZE = 128  # of hidden states
LORA = SimpleNamespace(fully_sharded_loras=False)


def make_config(**changes: Any) -> SimpleNamespace:
    """Return the part of a VllmConfig that is looked at, with no feature in use but *changes*."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            enable_elastic_ep=False,
            enable_eplb=False,
            use_sequence_parallel_moe=False,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            is_hybrid=False,
            is_attention_free=False,
            is_encoder_decoder=False,
            enable_return_routed_experts=False,
            architecture="",
            is_moe=False,
            use_mla=False,
            get_hidden_size=lambda: SIZE,
        ),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        use_v2_model_runner=False,
        kv_transfer_config=None,
        speculative_config=None,
        lora_config=None,
    )
    parts = (config, config.parallel_config, config.model_config, config.compilation_config.pass_config)
    for name, value in changes.items():
        owners = [owner for owner in parts if hasattr(owner, name)]
        assert len(owners) == 1, name
        setattr(owners[0], name, value)
    return config
