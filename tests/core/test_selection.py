"""Which module names a configuration selects."""

import pytest

from lumen_core.config import DEFAULT_IGNORED, module_selected

SENSITIVE = ("lm_head", "output_layer", "gate", "router", "shared_expert_gate", "lora_A", "lora_B", "lora_embedding_A")


@pytest.mark.parametrize("part", [*SENSITIVE, "lora_magnitude_vector", "embed_tokens", "word_embeddings"])
@pytest.mark.parametrize("where", ["{}", "model.layers.0.mlp.{}", "{}.default", "base.{}.base_layer"])
def test_ignored_by_default_unless_named_exactly(part, where):
    name = where.format(part)
    selected, reason = module_selected(name)
    assert not selected and any(repr(p) in reason for p in DEFAULT_IGNORED)
    assert module_selected(name, [name])[0]
    assert not module_selected(name, [name[:-1] + "?"])[0]
    assert not module_selected(name, [name], ["*"])[0]


@pytest.mark.parametrize("part", ["gate_proj", "gate_up_proj", "q_proj", "router_norm_proj", "gated", "mlp", "lora"])
def test_ordinary_names_are_selected(part):
    name = f"model.layers.0.mlp.{part}"
    assert module_selected(name) == (True, "apply_modules has '*'")
    assert module_selected(name, ["*.attn.*"])[0] is False
    assert module_selected(name, ["*.attn.*", "*.mlp.*"])[0] is True
    assert module_selected(name, ("*",), (f"*.{part}",)) == (False, f"ignored_modules has '*.{part}'")
