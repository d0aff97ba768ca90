"""`FlintForCausalLM`: a `Flint` as a model of Transformers."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from flint_kernels.integrations.transformers import loop, pretrained
from flint_kernels.integrations.transformers.arguments import check_forward, unsupported
from flint_kernels.integrations.transformers.cache import FlintCache, check_batch
from flint_kernels.integrations.transformers.config import FlintConfig
from flint_kernels.integrations.transformers.room import Shelf
from flint_kernels.integrations.transformers.rows import check_positions, check_prompt_end
from flint_kernels.integrations.transformers.step import step
from flint_kernels.model import Flint

_PAGED = (None, "dynamic", "static")
# No candidates to be taken back: a window layer's pages cannot give back what it has overwritten.
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH,
          GenerationMode.BEAM_SAMPLE)  # fmt: skip


class FlintForCausalLM(PreTrainedModel, GenerationMixin):
    """Flint's next-token logits, computed by the ops from weights in their checkpoint's own form.

    `from_pretrained` makes one. For inference alone: the ops have no backward, and dtypes belong to
    the checkpoint, so that casts change nothing. One device holds all of it.

    Args:
        config: of the model's shape.
        model: loaded, of that shape.

    Raises:
        TypeError, ValueError: no model, a config of another kind, or one of another shape.
    """

    config_class = FlintConfig
    config: FlintConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Layer"]  # noqa: RUF012  (Transformers reads a list)

    def __init__(self, config: FlintConfig, model: Flint | None = None) -> None:
        if not isinstance(config, FlintConfig):
            raise TypeError(
                f"config: got {type(config).__name__} of {type(config).__module__}; want this "
                "package's FlintConfig. AutoConfig.from_pretrained gives one."
            )
        if model is None:
            raise ValueError(
                "model: got none; want a loaded Flint. FlintForCausalLM.from_pretrained loads one; "
                "flint_kernels.loading.synthetic makes one of random weights."
            )
        pretrained.check_shape(config, model.config)
        super().__init__(config)
        self.model = model
        self._shelf = Shelf()
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> FlintForCausalLM:
        """Loads a checkpoint as `flint_kernels.loading.load` does: BF16 or NVFP4.

        Args:
            pretrained_model_name_or_path: a folder with config.json and safetensors or one .gguf
                file; one of the weight files itself; "flint-tiny" or "flint-tiny-bf16".
            config: a FlintConfig; None: the folder's config.json. `max_position_embeddings` may be
                smaller than the file's, which makes the RoPE table smaller.
            gguf_file: the .gguf file in the folder, where there are several.
            device_map: one device, as a name, number or torch.device, or {"": device}; "auto": a
                GPU where there is one; None: the CPU.
            dtype: "auto" or torch.bfloat16, which is what it is.
            generation_config: a GenerationConfig; None: the folder's, where there is one.
            tqdm_class, and what concerns downloads and remote code, which do not happen, is taken
                and changes nothing.

        Raises:
            FileNotFoundError, OSError: there is no such file; nothing is downloaded.
            TypeError, ValueError: an argument that has no meaning here (a quantization, an
                attention implementation, several devices ...), or a checkpoint that does not fit
                its config.
        """
        if args:
            raise TypeError(f"args: got {len(args)} positional arguments; want a path alone.")
        source = pretrained.locate(pretrained_model_name_or_path, kwargs)
        config = pretrained.take_config(FlintConfig, source, kwargs)
        device = pretrained.take_device(kwargs)
        generation_config = kwargs.pop("generation_config", None)
        pretrained.check_rest(kwargs)
        model = cls(config, pretrained.load_model(source, config, device))
        model.generation_config = (
            pretrained.generation_config(source, model.generation_config)
            if generation_config is None
            else generation_config
        )
        model.eval()  # type: ignore[no-untyped-call]
        return model

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> NoReturn:
        raise unsupported(
            "from_config",
            "a config without weights",
            "a checkpoint",
            "from_pretrained loads one. Random weights: FlintForCausalLM(config, "
            "flint_kernels.loading.synthetic(config.shape()))",
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: the tensors are in the ops' form."""
        raise unsupported(
            "save_pretrained",
            "a model in the ops' form",
            "a checkpoint's own writer",
            "flint_kernels.loading.export has one for each format: save_bf16, save_gguf, "
            "save_modelopt, each of which takes this model's `model`",
        )

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of new tokens, which go on from those in the cache.

        Args:
            input_ids: [B, S] int64 or int32, new tokens and padding.
            attention_mask: [B, columns of the cache + S], 1 for tokens and 0 for padding, which may
                be before a row's first token or after its last; None: no padding.
            cache: of the tokens before; None: a new one.
            labels: [B, S] int64 next tokens as Transformers takes them: those of the same columns,
                -100 for none. Gives a loss, of which there is no gradient.
            use_cache: whether the cache is returned; None: the config's.
            logits_to_keep: the last n columns alone, 0: all; or a tensor of column numbers.
            kwargs: `past_key_values`, another name for `cache`; `position_ids`, which have to be
                those that the mask gives; `return_dict`.

        Returns: `logits` [B, columns kept, vocab_size] fp32, zeros at padding; `cache`; `loss`.

        Raises:
            TypeError, ValueError: naming the argument; also for what the ops do not give (hidden
                states, attentions, router logits) or take (embeddings).
        """
        cache = check_forward(self.config, cache, kwargs)
        if input_ids is None:
            raise ValueError("input_ids: got none; want token ids [rows, tokens].")
        check_batch(input_ids)
        if cache is None:
            cache = FlintCache(self.model)
        elif not isinstance(cache, FlintCache) or cache.model is not self.model:
            raise unsupported(
                "cache",
                f"a {type(cache).__name__} of another model or kind",
                "this model's FlintCache",
                "Leave the argument out, or pass the cache that this model gave",
            )
        rows = cache.place(input_ids.shape, attention_mask)
        check_positions(kwargs.get("position_ids"), rows, cache.lengths)
        logits = step(self.model, input_ids, rows, cache, logits_to_keep)
        loss = None
        if labels is not None:
            if logits.shape[:2] != labels.shape:
                raise ValueError(
                    f"labels: got shape {list(labels.shape)}; want {list(logits.shape[:2])}, one "
                    "for each of the logits. Leave logits_to_keep out."
                )
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache if use_cache else None)

    # --------------------------------------------------------------------- what generate() asks

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Puts a FlintCache into model_kwargs, for as many tokens as the call may come to.

        generate() calls this once, when it knows all that is asked of it: so what cannot be done is
        refused here.
        """
        implementation = generation_config.cache_implementation
        if implementation not in _PAGED:
            raise unsupported(
                "cache_implementation",
                repr(implementation),
                "None, 'dynamic' or 'static'",
                "K and V lie in pages, which are neither offloaded nor quantised",
            )
        if generation_mode not in _MODES or generation_config.is_assistant:
            raise unsupported(
                "generate",
                "assisted generation or a mode like it",
                "greedy search, sampling or beams",
                "Leave out assistant_model, prompt_lookup_num_tokens and the like: window layers "
                "cannot take candidates back",
            )
        check_prompt_end(model_kwargs.get("attention_mask"))
        given = model_kwargs.get("cache")
        if given is not None or generation_config.use_cache is False:
            if isinstance(given, FlintCache):
                given.is_shared = True
            return
        length = max(max_cache_length, generation_config.max_cache_len or 0, 1)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if implementation == "static":
            cache = FlintCache(self.model, length, shelf=self._shelf, rows=rows)
        else:
            cache = FlintCache(self.model, length)
        model_kwargs["cache"] = cache

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The loop of greedy search and sampling, which generate() calls: see `loop`."""
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        if loop.takes(generation_config, model_kwargs, synced_gpus):
            return loop.sample(self, *given, streamer, model_kwargs)
        base: Any = super()
        return base._sample(*given, synced_gpus, streamer, **model_kwargs)

    def free_static_cache(self) -> None:
        """Lets go of the pages and graphs that `cache_implementation="static"` keeps."""
        self._shelf.clear()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: Transformers' paged cache is not one that the ops read."""
        raise unsupported(
            "generate_batch",
            "Transformers' continuous batching",
            "generate()",
            "It hands a model the place of every single token, and the ops read pages. "
            "flint_kernels.generation.Generation batches continuously, with this model's `model`",
        )
