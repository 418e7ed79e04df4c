"""Which of a decoder's layers are compiled."""

from backends.trainer.compiling import compile_layers
from tests.factories import make_renderer
from tests.models import make_tiny_qwen3_next


def test_layers_of_linear_attention_are_not_compiled(tmp_path):
    """Their code goes over a row in a loop: it would be compiled for every length."""
    source = make_tiny_qwen3_next(tmp_path)
    family = make_renderer(source).family
    layers = family.model_class.from_pretrained(source).get_decoder().layers
    compile_layers(layers)
    assert [(hasattr(layer, "linear_attn"), layer._compiled_call_impl is not None) for layer in layers] == [
        (True, False),
        (False, True),
    ]
