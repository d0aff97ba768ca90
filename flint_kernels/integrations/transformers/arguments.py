"""Arguments that models of Transformers share, and which of them have a meaning here."""

from __future__ import annotations

from typing import Any

_PACKED = "Sequences are not packed: pass a batch with padding, which costs nothing"

# What forward() of other models takes, and why this one does not.
_REFUSED = {
    "inputs_embeds": "The ops take ids",
    "output_attentions": "The ops do not keep them. Leave it out",
    "output_hidden_states": "Layers hand rows on inside the ops' module. Leave it out",
    "output_router_logits": "The router's op gives experts and weights. Leave it out",
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "max_length_k": _PACKED,
    "max_length_q": _PACKED,
    "seq_idx": _PACKED,
}
# What changes nothing: generate() hands its own tokenizers on, the trainer a count for the loss.
_WITHOUT_EFFECT = ("assistant_tokenizer", "num_items_in_batch", "tokenizer")
_READ = ("position_ids", "return_dict")


def unsupported(name: str, got: str, want: str, remedy: str) -> ValueError:
    """What this integration does not do, in the words that all errors have."""
    return ValueError(f"{name}: got {got}; want {want}. {remedy}.")


def check_forward(config: Any, cache: Any, kwargs: dict[str, Any]) -> Any:
    """The cache, under either of its names, once every other argument is one that is understood.

    Raises:
        TypeError: an argument that no model has.
        ValueError: one that this model cannot honour, in the call or in the config.
    """
    older = kwargs.pop("past_key_values", None)
    if cache is not None and older is not None and cache is not older:
        raise unsupported(
            "past_key_values", "another one beside `cache`", "one of the two", "Pass `cache` alone"
        )
    cache = older if cache is None else cache
    for name, value in kwargs.items():
        if name in _REFUSED and (value is not None and value is not False):
            raise unsupported(name, _short(value), "nothing", _REFUSED[name])
        if name == "is_causal" and value is False:
            raise unsupported(name, "False", "True", "Every query sees its past alone")
        if name not in (*_REFUSED, *_WITHOUT_EFFECT, *_READ, "is_causal"):
            raise TypeError(f"forward: got the argument {name!r}; want one of its signature.")
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        # What the call says has the last word, as everywhere in Transformers.
        if kwargs.get(name) is None and getattr(config, name, False):
            raise unsupported(f"config.{name}", "True", "False", _REFUSED[name])
    return cache


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor of shape {list(shape)}"
