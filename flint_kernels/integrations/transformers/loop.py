"""The decode loop of `generate()`: what Transformers' own gives, without waiting for the GPU.

Transformers' loop asks the model anew at each step: inputs are prepared, the mask is read back to
see where the rows' tokens are, and before the next step it waits to see whether all rows have
ended. Here a step is a token of every row, so nothing has to be asked; and on a GPU the next step
is launched before the answer is there, which at the end of a text is one step for nothing. Greedy
search without more to it is the library's own loop there (`greedy.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from flint_kernels.integrations.transformers import greedy
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
    """What the host has to know of each step: its tokens, for a streamer, and whether all rows have
    ended. On a GPU it is copied behind the step, and read when it is there.

    Of two steps at a time: the one that is read and the one that may be under way.
    """

    def __init__(self, rows: int, device: torch.device, streamer: BaseStreamer | None) -> None:
        self._streamer = streamer
        self._slots = [_Slot(rows, device.type == "cuda") for _ in range(2)]

    def note(self, tokens: Tensor, ended: Tensor | None) -> _Slot:
        slot = self._slots[0]
        self._slots.reverse()
        slot.streamed, slot.stops = self._streamer is not None, ended is not None
        if slot.streamed:
            slot.tokens.copy_(tokens, non_blocking=True)
        if ended is not None:
            slot.ended.copy_(ended, non_blocking=True)
        if slot.event is not None and (slot.streamed or slot.stops):
            slot.event.record(torch.cuda.current_stream(tokens.device))  # maybe not the current GPU
        return slot

    def read(self, slot: _Slot) -> bool:
        """Gives the streamer the step's tokens; whether all rows have ended."""
        if slot.event is not None and (slot.streamed or slot.stops):
            slot.event.synchronize()
        if self._streamer is not None:
            self._streamer.put(slot.tokens.clone())
        return slot.stops and bool(slot.ended)


class _Slot:
    """The answer of one step, in memory that the GPU copies to by itself."""

    def __init__(self, rows: int, on_gpu: bool) -> None:
        self.tokens = torch.empty(rows, dtype=torch.int64, pin_memory=on_gpu)
        self.ended = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None  # made where it is recorded first
        self.streamed = self.stops = False


def _stop_ids(criteria: Sequence[Any], device: torch.device) -> Tensor | None:
    """The tokens that end a text, of all criteria that are about nothing else."""
    ids = [one.eos_token_id.flatten() for one in criteria if type(one) is EosTokenCriteria]
    return torch.cat(ids).to(device) if ids else None


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
    known = (MaxLengthCriteria, EosTokenCriteria)
    others = [one for one in stopping_criteria if type(one) not in known]
    stop_ids = _stop_ids(stopping_criteria, input_ids.device)
    pad: Any = generation_config._pad_token_tensor
    pad = None if pad is None else pad.to(input_ids.device)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    if (
        runs_ahead
        and max_length is not None
        and not (generation_config.do_sample or logits_processor or others)
    ):
        steps = max_length - input_ids.shape[1] - 1
        own = greedy.loop_for(cache, steps)
        if own is not None:
            found = greedy.search(
                own,
                cache,
                logits.argmax(dim=-1),
                steps,
                stop_ids=set() if stop_ids is None else set(stop_ids.tolist()),
                pad=0 if pad is None else int(pad),
                streamer=streamer,
            )
            if streamer is not None:
                streamer.end()
            return torch.cat([input_ids, found.to(input_ids)], dim=-1)
    finished = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    answers = _Answers(len(finished), finished.device, streamer)
    while True:
        scores = logits_processor(input_ids, logits.clone()) if logits_processor else logits
        tokens = _choose(scores, generation_config.do_sample)
        if pads:
            tokens = torch.where(finished, pad, tokens)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        if stop_ids is not None:
            finished |= torch.isin(tokens, stop_ids)
        for criterion in others:
            finished |= criterion(input_ids, None)
        ended = finished.all() if others or stop_ids is not None else None
        answer = answers.note(tokens, ended)
        last = max_length is not None and input_ids.shape[1] >= max_length
        ahead = runs_ahead and not last and cache.holds_another_column
        if ahead:
            logits = decode_step(model.model, tokens, cache)
        if answers.read(answer) or last:
            break
        if not ahead:
            logits = decode_step(model.model, tokens, cache)
    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=input_ids, cache=cache)
    return input_ids
