"""The `__host__ __device__` helpers of csrc/, compiled for the host: every value there is.

They are the very code that the CUDA kernels are compiled from, so what holds here holds in them.
Each is compared with something written independently: ml_dtypes, torch, Python's integers.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from flint_kernels.reference.sampling import uniform

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[1]
ALL_BYTES = np.arange(256, dtype=np.uint8)
ALL_HALVES = np.arange(65536, dtype=np.uint16)  # every BF16 there is
INT64_MAX = 2**63 - 1


def build(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "-q", "build_test_module"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="session")
def helpers() -> Any:
    """The module, built anew where its sources have changed; an error where it cannot be."""
    done = build()
    if done.returncode:
        raise RuntimeError(f"csrc/test_module was not built:\n{done.stdout}{done.stderr}")
    path = done.stdout.splitlines()[-1]
    spec = importlib.util.spec_from_file_location("flint_device_helpers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def bits(values: Array) -> Array:
    """fp32 values as integers, all NaNs as one."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def from_bits(pattern: Array) -> Array:
    return pattern.astype(np.uint32).view(np.float32)


def value_of(key: int) -> float:
    """A BF16 as a Python float."""
    return float(from_bits(np.array([key << 16]))[0])


def test_a_module_that_cannot_be_built_is_an_error() -> None:
    done = build(CXX="no-such-compiler")
    assert done.returncode != 0
    assert "the test module is NOT built: no C++ compiler was found" in done.stderr


# ------------------------------------------------------------------------------ values


def test_every_bf16_is_read_right(helpers: Any) -> None:
    values = helpers.bf16_to_float(ALL_HALVES)
    assert values.dtype == np.float32
    assert np.array_equal(bits(values), bits(ALL_HALVES.view(ml_dtypes.bfloat16).astype("f4")))
    theirs = torch.from_numpy(ALL_HALVES.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bits(values), bits(theirs))


def test_every_bf16_survives_being_written(helpers: Any) -> None:
    written = helpers.float_to_bf16(helpers.bf16_to_float(ALL_HALVES))
    nan = (ALL_HALVES & 0x7FFF) > 0x7F80
    assert np.array_equal(written, np.where(nan, 0x7FC0, ALL_HALVES))


def test_every_tie_and_its_neighbours_round_to_even(helpers: Any, random: Any) -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, random.integers(0x10000)], np.uint32)
    values = from_bits((ALL_HALVES.astype(np.uint32)[:, None] << 16) | low)
    written = helpers.float_to_bf16(values)
    nan = np.isnan(values)
    assert np.all(written[nan] == 0x7FC0)
    ours, finite = written[~nan], values[~nan]
    assert np.array_equal(ours, finite.astype(ml_dtypes.bfloat16).view(np.uint16))
    theirs = torch.from_numpy(finite).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(ours, theirs.view(np.uint16))
    assert np.array_equal(bits(helpers.round_to_bf16(values)), bits(helpers.bf16_to_float(written)))


@pytest.mark.parametrize("upper", [0x0000, 0x0080, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F])
def test_every_lower_half_rounds_as_elsewhere(helpers: Any, upper: int) -> None:
    """Next to zero, at the smallest normal number, at one, and on either side of infinity."""
    values = from_bits((upper << 16) | ALL_HALVES.astype(np.uint32))
    theirs = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(helpers.float_to_bf16(values), theirs)


def test_every_e2m1_code_is_read_right(helpers: Any) -> None:
    codes = np.arange(16, dtype=np.uint8)
    values = from_bits(helpers.e2m1_bits(codes).astype(np.uint32) << 16)
    assert np.array_equal(bits(values), bits(codes.view(ml_dtypes.float4_e2m1fn).astype("f4")))
    assert values.tolist() == [
        *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
        *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    ]


def test_every_e4m3_byte_is_read_right(helpers: Any) -> None:
    values = helpers.e4m3_value(ALL_BYTES)
    assert np.array_equal(bits(values), bits(ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype("f4")))
    theirs = torch.from_numpy(ALL_BYTES).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(bits(values), bits(theirs))
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]


# ------------------------------------------------------------------------------ NVFP4's layouts


def nibbles(words: Array) -> Array:
    """[...] uint64 -> [..., 16], the lowest nibble first."""
    return (words[..., None] >> (4 * np.arange(16, dtype=np.uint64))) & np.uint64(15)


def words(codes: Array) -> Array:
    shifted = codes.astype(np.uint64) << (4 * np.arange(16, dtype=np.uint64))
    return np.bitwise_or.reduce(shifted, axis=-1)


def test_the_nibble_shuffle_is_that_of_the_layouts(helpers: Any, random: Any) -> None:
    """Each of the 16 codes in each of the 16 places, and random blocks."""
    one_code = words(np.eye(16, dtype=np.uint64)[:, None] * np.arange(16)[None, :, None])
    gguf = np.concatenate([one_code.ravel(), random.integers(2**64, size=10_000, dtype=np.uint64)])
    # Byte i of GGUF's block has value i below and value 8 + i above.
    values = nibbles(gguf).reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1, 16)
    modelopt = helpers.block_gguf_to_modelopt(gguf)
    assert np.array_equal(nibbles(modelopt), values)
    assert np.array_equal(helpers.block_modelopt_to_gguf(modelopt), gguf)


def test_G1_codes_in_order(helpers: Any) -> None:
    gguf, modelopt = bytes.fromhex("8091a2b3c4d5e6f7"), bytes.fromhex("1032547698badcfe")
    word = np.frombuffer(gguf, "<u8").astype(np.uint64)
    assert helpers.block_gguf_to_modelopt(word).astype("<u8").tobytes() == modelopt


def test_bits_are_swapped(helpers: Any, random: Any) -> None:
    word = random.integers(2**64, size=1000, dtype=np.uint64)
    assert np.array_equal(
        helpers.swap_bits(word, np.uint64(0x00000000FFFF0000), 16),
        (word & np.uint64(0xFFFF00000000FFFF))
        | ((word & np.uint64(0x00000000FFFF0000)) << np.uint64(16))
        | ((word & np.uint64(0x0000FFFF00000000)) >> np.uint64(16)),
    )


def scale_quads(random: Any) -> Array:
    """[n, 4] bytes: every pair of neighbouring bytes, beside random ones: carries would show."""
    pairs = np.stack(np.meshgrid(ALL_BYTES, ALL_BYTES, indexing="ij"), axis=-1).reshape(-1, 2)
    rest = random.integers(256, size=(3, len(pairs), 2), dtype=np.uint8)
    return np.concatenate([
        np.concatenate([pairs, rest[0]], axis=1),
        np.concatenate([rest[1][:, :1], pairs, rest[1][:, 1:]], axis=1),
        np.concatenate([rest[2], pairs], axis=1),
    ])  # fmt: skip


def test_Q1_four_scales_at_once(helpers: Any, random: Any) -> None:
    scales = scale_quads(random)
    packed = scales.view("<u4").astype(np.uint32)[:, 0]

    def each_byte(result: Array) -> Array:
        return result.astype("<u4").view(np.uint8).reshape(-1, 4)

    nan = (scales & 0x7F) == 0x7F
    assert np.array_equal(each_byte(helpers.nan_scales(packed)), np.where(nan, 0x80, 0))
    # ggml reads no sign, and 0x7f as zero; 0xff means nothing to anyone.
    bad = np.where(scales == 0xFF, 0x80, 0)
    assert np.array_equal(each_byte(helpers.gguf_scales_bad(packed)), bad)
    read = np.where(nan, 0, scales & 0x7F)
    assert np.array_equal(each_byte(helpers.scales_gguf_to_modelopt(packed)), read)
    # What is negative or NaN in E4M3 has no GGUF form; -0 has.
    values = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    bad = np.where(~(values >= 0), 0x80, 0)
    assert np.array_equal(each_byte(helpers.modelopt_scales_bad(packed)), bad)


def test_places_of_blocks_in_a_gguf_tensor(helpers: Any, random: Any) -> None:
    """Up to 2^59 blocks: far beyond 32 bits."""
    block = np.concatenate([np.arange(1000), random.integers(2**59, size=1000)])
    super_bytes = helpers.SUPERBLOCK_BYTES
    assert super_bytes == 36
    assert helpers.gguf_codes_at(block).tolist() == [
        b // 4 * super_bytes + 4 + b % 4 * 8 for b in block.tolist()
    ]
    assert helpers.gguf_scales_at(block // 4).tolist() == [
        b // 4 * super_bytes for b in block.tolist()
    ]


# ------------------------------------------------------------------------------ the paged cache


def test_offsets_of_slots_are_64_bit(helpers: Any, random: Any) -> None:
    count = 20_000
    page_size = random.choice([1, 16, 32, 48, 64, 128, 1000], count)
    slot = random.integers(2 ** random.integers(1, 38, count))
    head = random.integers(64, size=count)
    strides = [random.integers(2**24, size=count) for _ in range(3)]
    offsets = helpers.slot_offset(*strides, page_size, slot, head).tolist()
    wanted = [
        s // p * block + s % p * row + h * head_stride
        for block, row, head_stride, p, s, h in zip(
            *(x.tolist() for x in (*strides, page_size, slot, head)), strict=True
        )
    ]
    assert offsets == wanted
    # The test is about these: past 32 bits, and never past 64.
    assert sum(offset > 2**32 for offset in wanted) > count // 4
    assert max(wanted) <= INT64_MAX


def test_offsets_by_32_bit_division(helpers: Any, random: Any) -> None:
    """For every slot below 2^32, the largest among them; the offsets are 64-bit all the same."""
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    slot = np.concatenate([edges, random.integers(2**32, size=5000)]).astype(np.uint32)
    for page_size in (1, 16, 48, 128, 2**20):
        offsets = helpers.slot_offset_32(page_size * 2**16, 2**16, page_size, slot)
        assert offsets.tolist() == [s * 2**16 for s in slot.tolist()]
        wide = helpers.slot_offset(2**30, 2**9, 1, page_size, slot.astype(np.int64), 0)
        assert np.array_equal(helpers.slot_offset_32(2**30, 2**9, page_size, slot), wide)


def test_A8_offsets_around_the_32nd_bit(helpers: Any) -> None:
    """Flint's cache: 4 heads of 128, pages of 16; slot 2^22 begins element 2^31."""
    slot = np.arange(2**22 - 40, 2**22 + 40)
    offsets = helpers.slot_offset(16 * 512, 512, 128, 16, slot, 3)
    assert offsets.tolist() == [s * 512 + 384 for s in slot.tolist()]


def test_slots_of_positions(helpers: Any, random: Any) -> None:
    """Also in the last page that an int32 can name."""
    table = random.integers(2**31, size=257).astype(np.int32)
    table[-1] = 2**31 - 1
    for page_size in (16, 48, 128):
        position = np.arange(len(table) * page_size)
        slots = helpers.position_slot(table, page_size, position).tolist()
        assert slots == [int(table[p // page_size]) * page_size + p % page_size for p in position]
        assert slots[-1] == 2**31 * page_size - 1


def test_R3_what_becomes_of_a_row(helpers: Any) -> None:
    edges = [-(2**63), -(2**31), -2, -1, 0, 1, 62, 63, 64, 65, 2**31, 2**32 - 1, INT64_MAX]
    for slot in edges:
        for inside in (True, False):
            exists, asked = 0 <= slot < 64, slot != -1
            wanted = helpers.COMPUTE if inside and (exists or not asked) else helpers.NAN
            if not asked and not inside:
                wanted = helpers.ZEROS
            assert helpers.row_outcome(slot, 64, inside) == wanted, (slot, inside)


# ------------------------------------------------------------------------------ tiles and grids


def test_division_upwards(helpers: Any, random: Any) -> None:
    value = np.concatenate([np.arange(2000), random.integers(2**62, size=2000)])
    for step in (1, 2, 3, 8, 32, 256, 1000, 65535, 2**31 - 1):
        pieces = [-(-v // step) for v in value.tolist()]
        assert helpers.ceil_div(value, step).tolist() == pieces
        within = np.array([n * step <= INT64_MAX for n in pieces])
        assert helpers.round_up(value[within], step).tolist() == [
            n * step for n, ok in zip(pieces, within, strict=True) if ok
        ]


def test_the_lesser(helpers: Any, random: Any) -> None:
    left, right = random.integers(-(2**63), INT64_MAX, size=(2, 1000))
    assert np.array_equal(helpers.least(left, right), np.minimum(left, right))
    assert helpers.least(2**31, helpers.MOST_CTAS) == helpers.MOST_CTAS == 2**31 - 1


def test_alignment_of_every_row(helpers: Any) -> None:
    """True just where each of many rows begins at a multiple of the alignment."""
    base = 2**40
    for alignment in (1, 2, 4, 8, 16):
        for element_bytes in (1, 2, 4):
            address, stride = np.meshgrid(np.arange(base, base + 32), np.arange(40), indexing="ij")
            rows = address[..., None] + stride[..., None] * element_bytes * np.arange(17)
            wanted = (rows % alignment == 0).all(axis=-1)
            kept = helpers.keeps_alignment(
                address.astype(np.uint64), stride, element_bytes, alignment
            )
            assert np.array_equal(kept, wanted)


def test_Q6_tiles_cover_every_element_within_a_grids_limits(helpers: Any) -> None:
    threads = 256
    for columns in (1, 2, 31, 32, 33, 64, 96, 127, 128, 129, 255, 256, 257, 768, 6144, 10**6):
        for rows in (1, 2, 3, 7, 8, 9, 512, 513, 8192, 65535, 65536, 2**20, 2**40):
            across, down, ctas_across, ctas_down = helpers.element_tiles(columns, rows, threads)
            assert across * down == threads and across % 32 == 0
            assert 0 <= ctas_across * across - columns < across
            assert 1 <= ctas_down <= helpers.MOST_GRID_ROWS == 65535
            # No CTA without a row; and all rows at once, or as many CTAs as there can be.
            assert (ctas_down - 1) * down < rows
            assert ctas_down * down >= rows or ctas_down == 65535
            # Less than half of a row's threads are idle, save those of one warp.
            assert across == 32 or columns > across // 2


# ------------------------------------------------------------------------------ top-k keys


def rank_order(value: float) -> tuple[bool, float]:
    """NaN above all, then by value; Python holds -0.0 and 0.0 to be equal."""
    return (math.isnan(value), 0.0 if math.isnan(value) else value)


def test_ranks_of_every_bf16_are_ordered(helpers: Any) -> None:
    values = from_bits(ALL_HALVES.astype(np.uint32) << 16)
    ranks = helpers.topk_rank(values).tolist()
    order = [rank_order(v) for v in values.tolist()]
    by_value = sorted(range(65536), key=order.__getitem__)
    for lower, higher in itertools.pairwise(by_value):
        assert (ranks[lower] < ranks[higher]) == (order[lower] < order[higher])
        assert (ranks[lower] == ranks[higher]) == (order[lower] == order[higher])
    assert min(ranks) > 0


def test_ranks_of_fp32_are_ordered(helpers: Any, random: Any) -> None:
    """Neighbours by bits at every BF16, and random pairs."""
    near = from_bits((ALL_HALVES.astype(np.uint32)[:, None] << 16) | np.arange(3, dtype=np.uint32))
    other = from_bits(random.integers(2**32, size=(2, 200_000), dtype=np.uint32))
    for left, right in ((near[:, :-1], near[:, 1:]), (near[:, :1], near[::-1, 1:]), other):
        left_rank, right_rank = helpers.topk_rank(left), helpers.topk_rank(right)
        left_nan, right_nan = np.isnan(left), np.isnan(right)
        assert np.array_equal(left_rank < right_rank, (left < right) | (~left_nan & right_nan))
        assert np.array_equal(left_rank == right_rank, (left == right) | (left_nan & right_nan))


def test_T2_equal_logits_are_ordered_by_index(helpers: Any) -> None:
    index = np.concatenate([np.arange(512), 2**32 - 1 - np.arange(512)]).astype(np.uint32)
    for value in (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan):
        keys = helpers.topk_key(np.float32(value), index)
        assert keys.dtype == np.uint64
        assert np.array_equal(np.argsort(keys)[::-1], np.argsort(index))
        assert np.array_equal(helpers.topk_index(keys), index)
    # A better logit beats any index.
    assert helpers.topk_key(np.float32(-0.0), 0) == helpers.topk_key(np.float32(0.0), 0)
    assert helpers.topk_key(np.float32(1e-45), 2**32 - 1) > helpers.topk_key(np.float32(0.0), 0)


def test_keys_of_every_bf16_and_index(helpers: Any) -> None:
    """The 32-bit key orders as the 64-bit one does, and gives the index back."""
    values = from_bits(ALL_HALVES.astype(np.uint32) << 16)
    index = np.array([0, 1, 127, 255, 256, 65534, 65535], np.uint32)
    wide = helpers.topk_key(values[:, None], index).ravel()
    narrow = helpers.topk_key_bf16(ALL_HALVES[:, None], index.astype(np.uint16)).ravel()
    assert narrow.dtype == np.uint32
    assert np.array_equal(
        np.unique(wide, return_inverse=True)[1], np.unique(narrow, return_inverse=True)[1]
    )
    assert np.array_equal(helpers.topk_index_bf16(narrow), np.tile(index, 65536))
    assert narrow.min() > 0


def test_T1_the_largest_keys_are_a_routers_choice(helpers: Any, random: Any) -> None:
    """Against a stable sort in Python, with many ties, infinities and NaNs."""
    pool = np.array([0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x3F80, 0x3F81, 0xBF80])
    for _ in range(200):
        logits = random.choice(pool, 256).astype(np.uint16)
        values = [rank_order(value_of(int(bit))) for bit in logits]
        wanted = sorted(range(256), key=values.__getitem__, reverse=True)  # keeps ties in order
        keys = helpers.topk_key_bf16(logits, np.arange(256, dtype=np.uint16))
        assert helpers.topk_index_bf16(np.sort(keys)[::-1]).tolist() == wanted


def test_the_uniform_numbers_of_sampling(helpers: Any) -> None:
    """Against Python's integers, whose Philox the tests of sampling hold to its known answers."""
    edges = [0, 1, -1, 2**32 - 1, 2**32, -(2**63), INT64_MAX]
    random = np.random.default_rng(0).integers(-(2**63), INT64_MAX, 500).tolist()
    pairs = [*itertools.product(edges, edges), *itertools.pairwise(random)]
    seeds, offsets = np.array(pairs, dtype=np.int64).T
    want = [uniform(seed, offset) for seed, offset in pairs]
    assert helpers.uniform_53(seeds, offsets).tolist() == want


def test_the_arranged_order_of_columns(helpers: Any) -> None:
    """Column 64t + 16p + 8e + 4b + s at place 64p + 16s + 8e + 2t + b, in each 256."""
    columns = np.arange(0, 512, 8, dtype=np.int32)
    place = np.empty(512, np.int64)
    first = helpers.arranged_pair(columns)
    for s in range(4):
        for b in range(2):
            place[columns + 4 * b + s] = first + s * helpers.PAIR_DISTANCE + b
    for column in range(512):
        t, p, e, b, s = (column // 64 % 4, column // 16 % 4, column // 8 % 2, column // 4 % 2,
                         column % 4)  # fmt: skip
        assert place[column] == column // 256 * 256 + 64 * p + 16 * s + 8 * e + 2 * t + b
    assert sorted(place) == list(range(512))


# ------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 513, 1009])
def test_tiles_hold_what_a_query_sees_and_no_tile_without_a_key(helpers: Any, window: int) -> None:
    tile = helpers.ATTENTION_TILE
    for length in range(1, 1100):
        first, last, begin, end = helpers.attention_keys(length, 2048, window)
        assert list(range(first, last)) == list(range(length))[-window:]
        assert begin == first // tile and (end - 1) * tile < last <= end * tile


def test_lengths_that_a_table_cannot_name_have_no_keys(helpers: Any) -> None:
    for length in (-(2**31), -1, 0, 2049, 2**31 - 1):
        assert helpers.attention_keys(length, 2048, 513) == (0, 0, 0, 0)
    most = 2**31 - 1
    first, last, begin, end = helpers.attention_keys(most, 2**40, 513)
    assert (first, last, begin, end) == (most - 513, most, (most - 513) // 16, 2**31 // 16)


@pytest.mark.parametrize("most", [1, 16, 33, 37, 64])
def test_splits_cover_the_tiles_once_and_none_is_empty(helpers: Any, most: int) -> None:
    for tiles in (*range(1100), 6250, 16_384, 2**27):
        count, each = helpers.attention_splits(tiles, most)
        assert 1 <= count <= most
        assert (count - 1) * each < max(tiles, 1) and tiles <= count * each
        # No more of them than the room for partial results is reckoned for.
        assert count <= max(1, -(-tiles // helpers.LEAST_SPLIT_TILES))
        if tiles:
            assert each >= min(tiles, helpers.LEAST_SPLIT_TILES)


@pytest.mark.parametrize("window", [0, 1, 16, 17, 100, 513])
@pytest.mark.parametrize("keys", [16, 112, 176])
def test_tiles_of_keys_hold_what_queries_see_once_and_in_order(
    helpers: Any, window: int, keys: int
) -> None:
    group = helpers.PAGE_GROUP
    for context in (0, 1, 15, 16, 111, 112, 113, 500, 513, 600):
        for query in (0, 1, 24, 480, 504, 528):
            for queries in (1, 2, 23, 24):
                first, last = context + query, context + query + queries - 1
                oldest, past, starts = helpers.key_tiles(context, first, last, window, keys)
                assert oldest == (max(0, first - window + 1) if window else 0)
                old = [k for s in starts[:past] for k in range(s, min(s + keys, context))]
                new = [k for s in starts[past:] for k in range(s, min(s + keys, last + 1))]
                assert [k for k in old if k >= oldest] == list(range(oldest, context))
                assert new == list(range(max(oldest, context), last + 1))
                # A tile of the past begins with a group of a page, and none is without a key.
                assert all(start % group == 0 for start in starts[:past])
                assert all(min(start + keys, context) > oldest for start in starts[:past])
                assert len(starts) > past and starts[-1] <= last


def test_a_long_request_of_one_gpu_is_split_evenly(helpers: Any) -> None:
    """33 splits of each of 4 KV heads are the 132 multiprocessors of an H200."""
    for length in (50_000, 100_000, 262_144):
        tiles = -(-length // helpers.ATTENTION_TILE)
        count, each = helpers.attention_splits(tiles, 33)
        assert count == 33
        assert each * 33 <= 1.02 * tiles
