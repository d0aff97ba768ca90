"""The decode loop of `generate()`: what Transformers' own gives, without waiting for the GPU.

Transformers' loop asks the model anew at each step: inputs are prepared, the mask is read back to
see where the rows' tokens are, and before the next step it waits to see whether all rows have
ended. Here a step is a token of every row, so nothing has to be asked; and on a GPU the next step
is launched before the answer is there, which at the end of a text is one step for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from flint_kernels.integrations.transformers.cache import FlintCache
from flint_kernels.integrations.transformers.step import decode_step

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer


def takes(config: GenerationConfig, model_kwargs: dict[str, Any], synced_gpus: bool) -> bool:
    """Whether `sample` gives all that is asked for; else Transformers' loop has to."""
    recorded = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    other = config.output_attentions or config.output_hidden_states or config.is_assistant
    return (
        isinstance(model_kwargs.get("cache"), FlintCache)
        and bool(model_kwargs.get("use_cache"))
        and not (synced_gpus or recorded or other)
    )


class _Answers:
    """What the host has to know of a step: its tokens, for a streamer, and whether all rows have
    ended. On a GPU it is copied behind the step, and read when it is there."""

    def __init__(self, tokens: Tensor, ended: Tensor | None, *, streamed: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = _to_host(tokens) if streamed else None
        self._ended = None if ended is None else _to_host(ended)
        if tokens.device.type == "cuda" and (streamed or ended is not None):
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self, streamer: BaseStreamer | None) -> bool:
        """Gives the streamer its tokens; whether all rows have ended."""
        if self._event is not None:
            self._event.synchronize()
        if streamer is not None and self._tokens is not None:
            streamer.put(self._tokens)
        return self._ended is not None and bool(self._ended)


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _choose(scores: Tensor, do_sample: bool) -> Tensor:
    """[B] tokens; draws as Transformers does, from the same numbers."""
    if not do_sample:
        return scores.argmax(dim=-1)
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)


def _may_run_ahead(config: GenerationConfig, cache: FlintCache) -> bool:
    """On a GPU; but a cache that others go on with must not have a step too many."""
    returned = config.return_dict_in_generate or cache.is_shared
    return cache.model.device.type == "cuda" and not returned


def sample(
    model: Any,
    input_ids: Any,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Any:
    """Greedy search or sampling, as `GenerationMixin._sample`; the same tokens and draws.

    Args:
        model: a FlintForCausalLM.
        model_kwargs: with a FlintCache as `cache`, which is written.
        The others: as Transformers passes them.

    Returns: [B, columns] ids, or a GenerateDecoderOnlyOutput where the config asks for one.
    """
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    cache: FlintCache = outputs.cache
    logits = outputs.logits[:, -1]
    del outputs  # of all columns
    runs_ahead = _may_run_ahead(generation_config, cache)
    max_length = stopping_criteria.max_length
    # Its answer is known beforehand, and is the same for all rows.
    others = [one for one in stopping_criteria if type(one) is not MaxLengthCriteria]
    pad: Any = generation_config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in others)
    finished = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    while True:
        scores = logits_processor(input_ids, logits.clone()) if logits_processor else logits
        tokens = _choose(scores, generation_config.do_sample)
        if pads:
            tokens = torch.where(finished, pad, tokens)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        for criterion in others:
            finished |= criterion(input_ids, None)
        ended = finished.all() if others else None
        answers = _Answers(tokens, ended, streamed=streamer is not None)
        last = max_length is not None and input_ids.shape[1] >= max_length
        ahead = runs_ahead and not last and cache.holds_another_column
        if ahead:
            logits = decode_step(model.model, tokens, cache)
        if answers.read(streamer) or last:
            break
        if not ahead:
            logits = decode_step(model.model, tokens, cache)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=input_ids, cache=cache)
    return input_ids
