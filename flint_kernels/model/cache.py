"""The paged KV cache: pages, requests, and the plan of a step.

Full layers share one pool of pages, taken by a request as it grows. A window layer's query sees the
last `window` tokens and no more, so a request holds R = ceil((window - 1) / page_size) + 1 pages
there from start to end, used as a ring. R is enough: the window before and with a new token touches
at most R pages, and the page that the token overwrites lies wholly before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flint_kernels.arguments import integer
from flint_kernels.memory import room_for
from flint_kernels.model.batch import DecodeBatch, PrefillBatch
from flint_kernels.model.buffers import ALIGN, DecodeBuffers
from flint_kernels.model.config import FlintConfig
from flint_kernels.ops import make_workspace


class LayerCache(NamedTuple):
    """K and V of a layer: [pages, page_size, Hkv, D] views of [pages, Hkv, page_size, D] tensors,
    so that the rows of a head in a page lie together."""

    k: Tensor
    v: Tensor


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than a step needs; nothing was changed."""


class PagedKVCache:
    """K and V of every layer for up to `max_requests` requests at a time.

    A request is a number from `add()` until `release()`. Each step, `plan()` reserves pages for the
    new tokens and says where everything lies; the model then writes there. Numbers of pages and
    lengths live on the host: planning never waits for the device.

    Args:
        config: the model's shape.
        max_requests: requests that may live at once.
        tokens: what the full layers' pool holds, shared by all requests, in whole pages; None:
            every request may grow to max_positions.
        page_size: tokens a page: 16, or another multiple of 16 up to 128.
        max_positions: the longest request; None: the config's max_position_embeddings.
        dtype: the model's compute dtype, bfloat16 or float32.
        device: the model's; "meta" allocates nothing, for `bytes()`.

    Raises:
        ValueError: an argument is out of range.
        MemoryError: K and V do not fit on the device; the message says how much they are.
    """

    def __init__(
        self,
        config: FlintConfig,
        *,
        max_requests: int = 1,
        tokens: int | None = None,
        page_size: int = 16,
        max_positions: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        if page_size % 16 != 0 or not 16 <= page_size <= 128:
            raise _error("page_size", page_size, "a multiple of 16 from 16 to 128")
        if max_requests < 1:
            raise _error("max_requests", max_requests, "1 or more")
        if max_positions is None:
            max_positions = config.max_position_embeddings
        if max_positions < 1:
            raise _error("max_positions", max_positions, "1 or more")
        self.width = -(-max_positions // page_size)
        if tokens is None:
            tokens = max_requests * self.width * page_size
        if tokens < 0:
            raise _error("tokens", tokens, "0 or more")
        self.max_requests = max_requests
        self.max_positions = max_positions
        self.page_size = page_size
        self.device = torch.get_default_device() if device is None else torch.device(device)

        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self.window = max(windows)  # one number: the config has one sliding_window
        full = 0 in windows
        self.pages = -(-tokens // page_size) if full else 0
        self.ring_pages = (
            min(-(-(self.window - 1) // page_size) + 1, self.width) if self.window else 0
        )
        if max(self.pages, max_requests * self.ring_pages) * page_size >= 1 << 31:
            raise _error("tokens", tokens, "fewer than 2**31 in all: slots are int32")
        self._full = full
        self._windows = windows

        ring = max_requests * self.ring_pages
        pages = [ring if window else self.pages for window in windows]
        page_bytes = page_size * config.num_key_value_heads * config.head_dim * dtype.itemsize
        with room_for(2 * sum(pages) * page_bytes, "cache", self.device):
            self.layers = tuple(self._layer_cache(config, count, dtype) for count in pages)
        self.block_table = torch.zeros(
            max_requests, self.width, dtype=torch.int32, device=self.device
        )
        self.window_block_table = self._ring_table()
        self._no_slots = torch.empty(0, dtype=torch.int32, device=self.device)
        self.workspace = make_workspace(self.device)

        self._free_requests = list(range(max_requests - 1, -1, -1))
        self._free_pages = list(range(self.pages - 1, -1, -1))
        self._lengths: dict[int, int] = {}  # of live requests
        self._pages: dict[int, list[int]] = {}
        self._growth = 0  # counts changes of block_table

    def _layer_cache(self, config: FlintConfig, pages: int, dtype: torch.dtype) -> LayerCache:
        shape = (pages, config.num_key_value_heads, self.page_size, config.head_dim)
        k, v = (
            torch.zeros(shape, dtype=dtype, device=self.device).permute(0, 2, 1, 3)
            for _ in range(2)
        )
        return LayerCache(k, v)

    def _ring_table(self) -> Tensor:
        """[max_requests, width]: request r's entry j is r * R + j mod R, which never changes."""
        entries = torch.arange(self.width, dtype=torch.int32, device=self.device)
        first = torch.arange(self.max_requests, dtype=torch.int32, device=self.device)
        ring = max(self.ring_pages, 1)
        return first[:, None] * ring + entries % ring

    @property
    def free_pages(self) -> int:
        """Pages of the full layers' pool that no request holds."""
        return len(self._free_pages)

    @property
    def free_requests(self) -> int:
        """How many more requests may be added."""
        return len(self._free_requests)

    @property
    def requests(self) -> list[int]:
        """The live requests, in the order of their numbers."""
        return sorted(self._lengths)

    def bytes(self) -> int:
        """Bytes of all tensors on the device: K and V of every layer, tables and workspace."""
        tensors = [self.block_table, self.window_block_table, self.workspace]
        tensors += [tensor for layer in self.layers for tensor in layer]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def pages_for(self, length: int) -> int:
        """Pages of the pool that a request of `length` tokens holds."""
        return -(-length // self.page_size) if self._full else 0

    def length(self, request: int) -> int:
        """Tokens of a live request that are cached, those of the last plan among them."""
        self._check_live(request)
        return self._lengths[request]

    def page_ids(self, request: int) -> tuple[int, ...]:
        """The pages of the pool that a live request holds, in the order of its tokens."""
        self._check_live(request)
        return tuple(self._pages[request])

    def add(self) -> int:
        """A new, empty request; its number is free again after `release`.

        Raises:
            RuntimeError: max_requests requests are live.
        """
        if not self._free_requests:
            raise RuntimeError(
                f"max_requests: got one more than {self.max_requests} live requests; want at most "
                f"{self.max_requests}. Release one, or make the cache with a larger max_requests."
            )
        request = self._free_requests.pop()
        self._lengths[request] = 0
        self._pages[request] = []
        return request

    def release(self, request: int) -> None:
        """Ends a live request; its pages may be given to others at once."""
        self._check_live(request)
        self._free_pages.extend(reversed(self._pages.pop(request)))
        del self._lengths[request]
        self._free_requests.append(request)

    def hold(self, requests: Sequence[int], lengths: Sequence[int]) -> None:
        """Takes the pages that each request needs to have `lengths[i]` tokens; it has no more
        tokens by it. What steps until then need is there, and tables no longer change.

        Raises:
            ValueError: a request is not live, named twice, or would exceed max_positions.
            OutOfPagesError: the pool is too small. In every case nothing has changed.
        """
        missing = [
            max(0, length - self._lengths.get(request, 0))
            for request, length in zip(requests, lengths, strict=True)
        ]
        self._check_room(requests, missing, least=0)
        for request, length in zip(requests, lengths, strict=True):
            self._grow(request, length)

    def advance_decode(self, requests: Sequence[int], into: DecodeBuffers) -> None:
        """Reserves one token more for each of `requests`, whose steps are in `into`, where the
        device plans this one at the end of the one before (`flint::decode_advance`).

        That needs the page of the token in the tables as the step before begins: where `hold` has
        not taken it, the host plans the step, as `plan_decode` does.

        Raises: as `plan_decode`.
        """
        self._check_buffers(into, len(requests))
        planned = into.shows(requests, self._growth) and all(
            self.pages_for(self._lengths[request] + 1) <= len(self._pages[request])
            for request in requests
        )
        if planned:
            self._reserve(requests, [1] * len(requests))
        else:
            self.plan_decode(requests, into=into)

    def copy(self, request: int, source: PagedKVCache | None = None) -> int:
        """A new request of the same tokens: its own pages, K and V copied from those of `request`.

        Args:
            request: a live request of `source`.
            source: the cache it is in, of the same model, page size, dtype and device; None: this.

        Raises:
            ValueError: the request is not live, longer than max_positions, or of a cache of another
                form.
            RuntimeError: max_requests requests are live.
            OutOfPagesError: the pool is too small. In every case nothing has changed.
        """
        source = self if source is None else source
        source._check_live(request)
        self._check_form(source)
        new = self.add()
        length = source._lengths[request]
        if length == 0:
            return new
        try:
            self._reserve([new], [length])
        except (ValueError, OutOfPagesError):
            self.release(new)
            raise
        last = (length - 1) // self.page_size
        rings = (source._ring_pages_of(request, last), self._ring_pages_of(new, last))
        pages = (source._pages[request], self._pages[new])
        index = [torch.tensor(ids).to(self.device, non_blocking=True) for ids in (*rings, *pages)]
        for layer, window in enumerate(self._windows):
            held, own = index[:2] if window else index[2:]
            for target, values in zip(self.layers[layer], source.layers[layer], strict=True):
                target[own] = values[held]
        return new

    def make_decode_buffers(self, rows: int) -> DecodeBuffers:
        """Buffers that `plan_decode` may write steps of up to `rows` requests into."""
        return DecodeBuffers(self, rows, self.width, self.block_table.device)

    def plan_decode(
        self, requests: Sequence[int], into: DecodeBuffers | None = None
    ) -> DecodeBatch:
        """Reserves one token for each of `requests` and plans the step.

        The batch is valid until the next plan, add or release: its tables may be views.

        Args:
            requests: live requests, none twice: row i is requests[i]'s.
            into: buffers that `make_decode_buffers` of this cache gave; the batch is then theirs,
                the rows after the requests padding, and valid until they are written again.

        Raises:
            ValueError: a request is not live, is named twice, or would exceed max_positions; or
                `into` has too few rows, or is another cache's.
            OutOfPagesError: the pool is too small. In every case nothing has changed.
        """
        if into is not None:
            self._check_buffers(into, len(requests))
        positions = [self._lengths.get(request, -1) for request in requests]
        self._reserve(requests, [1] * len(requests))
        page_size, ring = self.page_size, self.ring_pages
        slots, window_slots = [], []
        for request, position in zip(requests, positions, strict=True):
            page, offset = divmod(position, page_size)
            slots.append(self._pages[request][page] * page_size + offset if self._full else -1)
            window_slots.append((request * ring + page % ring) * page_size + offset if ring else -1)
        seq_lens = [position + 1 for position in positions]
        if into is not None:
            into.send(positions, slots, window_slots, seq_lens)
            into.show(requests, self._growth, self.block_table, self.window_block_table)
            return into.batch
        sent = self._send(positions, slots, window_slots, seq_lens)
        table, window_table = self._tables(requests)
        return DecodeBatch(
            positions=sent[0],
            slots=sent[1],
            window_slots=sent[2],
            block_table=table,
            window_block_table=window_table,
            seq_lens=sent[3],
        )

    def plan(
        self,
        requests: Sequence[int],
        counts: Sequence[int],
        wants_logits: Sequence[bool] | None = None,
    ) -> PrefillBatch:
        """Reserves `counts[i]` new tokens for `requests[i]` and plans the step.

        The batch is valid until the next plan, add or release: its tables may be views.

        Args:
            requests: live requests, none twice; their rows follow one another in this order.
            counts: new tokens of each, 1 or more.
            wants_logits: whether `Flint.forward` is to give a request's logits; None: all.

        Raises:
            ValueError: a request is not live, is named twice, or would exceed max_positions; or
                the arguments are not equally long.
            TypeError: a count is no integer.
            OutOfPagesError: the pool is too small. In every case nothing has changed.
        """
        wanted = [True] * len(requests) if wants_logits is None else wants_logits
        for name, values in (("counts", counts), ("wants_logits", wanted)):
            if len(values) != len(requests):
                want = f"{len(requests)}, one for each of requests; pass lists of one length"
                raise _error(name, f"{len(values)} values", want)
        counts = [integer("counts", count, "1 or more") for count in counts]
        contexts = [self._lengths.get(request, 0) for request in requests]
        self._reserve(requests, counts)
        ends = [context + count for context, count in zip(contexts, counts, strict=True)]
        positions, slots, window_slots = [], [], []
        cu_seqlens = [0]
        for request, context, end in zip(requests, contexts, ends, strict=True):
            rows = torch.arange(context, end)
            page = rows // self.page_size
            offset = rows - page * self.page_size
            positions.append(rows)
            slots.append(self._slots(request, page, offset))
            window_slots.append(self._window_slots(request, page, offset, rows, end))
            cu_seqlens.append(cu_seqlens[-1] + end - context)
        last_rows = [row - 1 for row, want in zip(cu_seqlens[1:], wanted, strict=True) if want]
        sent = self._send(
            _join(positions),
            _join(slots),
            _join(window_slots),
            ends,
            contexts,
            cu_seqlens,
            last_rows,
        )
        table, window_table = self._tables(requests)
        longest = max(counts, default=1)
        return PrefillBatch(
            positions=sent[0],
            slots=sent[1],
            window_slots=sent[2],
            block_table=table,
            window_block_table=window_table,
            seq_lens=sent[3],
            context_lens=sent[4],
            cu_seqlens=sent[5],
            last_rows=sent[6],
            no_slots=self._no_slots,
            # A power of two: a compiled module is specialised on it, and few values recompile.
            max_query_len=1 << (longest - 1).bit_length(),
        )

    def _slots(self, request: int, page: Tensor, offset: Tensor) -> Tensor:
        if not self._full:
            return torch.full_like(page, -1)
        first = int(page[0])
        pages = torch.tensor(self._pages[request][first:])
        return pages[page - first] * self.page_size + offset

    def _window_slots(
        self, request: int, page: Tensor, offset: Tensor, rows: Tensor, end: int
    ) -> Tensor:
        """Slots of the rows that the token at `end` will see; no two rows share one."""
        if not self.ring_pages:
            return torch.full_like(page, -1)
        ring = (request * self.ring_pages + page % self.ring_pages) * self.page_size + offset
        return torch.where(rows > end - self.window, ring, -1)

    def _reserve(self, requests: Sequence[int], counts: Sequence[int]) -> None:
        """Checks everything, then takes the pages and grows the requests."""
        self._check_room(requests, counts)
        for request, count in zip(requests, counts, strict=True):
            self._lengths[request] += count
            self._grow(request, self._lengths[request])

    def _check_room(self, requests: Sequence[int], counts: Sequence[int], least: int = 1) -> None:
        """Whether each request can have `counts[i]` tokens more, `least` of them at least."""
        if len(set(requests)) != len(requests):
            raise _error("requests", list(requests), "no request twice")
        needed = 0
        for request, count in zip(requests, counts, strict=True):
            self._check_live(request)
            if count < least:
                raise _error("counts", f"{count} for request {request}", "1 or more")
            length = self._lengths[request] + count
            if length > self.max_positions:
                raise _error(
                    "counts",
                    f"{count} tokens more for request {request}, {length} in all",
                    f"at most {self.max_positions} (max_positions)",
                )
            needed += max(0, self.pages_for(length) - len(self._pages[request]))
        if needed > len(self._free_pages):
            raise OutOfPagesError(
                f"tokens: got a pool with {len(self._free_pages)} free pages of {self.pages}; want "
                f"{needed} for this step ({self.page_size} tokens a page). Release requests, wait "
                "with some of these, or make the cache with more tokens."
            )

    def _grow(self, request: int, length: int) -> None:
        pages = self._pages[request]
        missing = self.pages_for(length) - len(pages)
        if missing <= 0:
            return
        start = len(pages)
        pages.extend(self._free_pages.pop() for _ in range(missing))
        row = torch.tensor(pages[start:], dtype=torch.int32)
        self.block_table[request, start : len(pages)].copy_(row, non_blocking=True)
        self._growth += 1

    def _ring_pages_of(self, request: int, last: int) -> list[int]:
        """Pages of the window layers that hold a request's latest tokens, up to its page `last`."""
        ring = self.ring_pages
        return [request * ring + page % ring for page in range(max(0, last + 1 - ring), last + 1)]

    def _check_form(self, other: PagedKVCache) -> None:
        def form(cache: PagedKVCache) -> tuple[object, ...]:
            k = cache.layers[0].k
            return cache._windows, cache.page_size, k.shape[2:], k.dtype, k.device

        if form(other) != form(self):
            want = "one of the same windows, page size, heads, dtype and device"
            raise _error("source", "a cache of another form", want)

    def _check_buffers(self, buffers: DecodeBuffers, count: int) -> None:
        if buffers.owner is not self:
            want = "those that make_decode_buffers of this cache gave"
            raise _error("into", "buffers of another cache", want)
        if count > buffers.rows:
            want = f"at most {buffers.rows}, the rows of `into`"
            raise _error("requests", f"{count} requests", want)

    def _check_live(self, request: int) -> None:
        if request not in self._lengths:
            raise _error("requests", request, f"a live request, one of {self.requests}")

    def _tables(self, requests: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows of both tables; a view where the requests are 0, 1, 2 ... in order.

        To torch.compile the two must be tensors of one kind, or a compiled model would be compiled
        twice: the view comes without its base (`.data`), the copy is no inference tensor.
        """
        count = len(requests)
        if list(requests) == list(range(count)):
            return self.block_table[:count].data, self.window_block_table[:count].data
        with torch.inference_mode(False):
            rows = torch.tensor(requests, dtype=torch.int64).to(self.device, non_blocking=True)
            return self.block_table[rows], self.window_block_table[rows]

    def _send(self, *fields: Sequence[int] | Tensor) -> list[Tensor]:
        """int32 copies of `fields` on the device, sent in one transfer."""
        if self.device.type == "cpu":
            return [torch.as_tensor(field, dtype=torch.int32) for field in fields]
        sizes = [len(field) for field in fields]
        padded = [-(-size // ALIGN) * ALIGN for size in sizes]
        host = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for target, field, size in zip(torch.split(host, padded), fields, sizes, strict=True):
            target[:size] = torch.as_tensor(field, dtype=torch.int32)
        sent = host.to(self.device, non_blocking=True)
        return [part[:size] for part, size in zip(torch.split(sent, padded), sizes, strict=True)]


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _error(argument: str, got: object, want: str) -> ValueError:
    return ValueError(f"{argument}: got {got}; want {want}.")
