"""The decoder inside a model of images or sound, as a checkpoint of its own.

With text alone such a model is its decoder: the rest is never asked. Only families for which a test
shows that are taken; PaliGemma, for one, lets prompts look ahead.
"""

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.models.config_values import in_one_line
from engine.weights import Checkpoint, UnsupportedModelError

FAMILIES = ("gemma3", "gemma4", "internvl", "llava", "mistral3")  # by model_type
# where the decoder's tensors are, in the orders of several years -> where its own class has them
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.": "",
    "lm_head.": "lm_head.",
}


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Raises UnsupportedModelError when the model is not known to be its decoder on text."""
    (architecture,) = checkpoint.config.get("architectures") or [None]
    model_type = checkpoint.config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{architecture} is more than a decoder; the text part is served of "
            f"{', '.join(FAMILIES)}, not of {model_type!r}"
        )
    try:
        text = CONFIG_MAPPING[model_type].from_dict(checkpoint.config).get_text_config()
        text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    except Exception as error:
        # settings that a class refuses, and decoders of no known class, each in its own way
        raise UnsupportedModelError(
            f"{architecture}: its config.json gives transformers no decoder: {in_one_line(error)}"
        ) from error
    names = {}
    for stored in checkpoint.names:
        for prefix, own in PREFIXES.items():
            if stored.startswith(prefix):
                names[own + stored.removeprefix(prefix)] = stored
                break
    config = text.to_dict() | {
        "architectures": [text_class.__name__],
        "tie_word_embeddings": "lm_head.weight" not in names,
    }
    return checkpoint.part(config, names)
