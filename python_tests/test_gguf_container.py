"""The GGUF reader: against files of the gguf package, and against damaged and hostile ones."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_kernels.formats import nvfp4
from flint_kernels.formats.gguf import GGML_TYPES, MAX_HEADER_BYTES, GGUFFile

NVFP4 = gguf.GGMLQuantizationType.NVFP4
UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9


# ------------------------------------------------------------------------- files


def write_sample(path: Path) -> dict[str, np.ndarray]:
    """A small file by the gguf package; returns the raw data of its tensors."""
    generator = np.random.default_rng(0)
    stacked = generator.integers(0, 126, (2, 4, 72), dtype=np.uint8)
    data: dict[str, np.ndarray] = {
        "blk.0.attn_norm.weight": generator.standard_normal(7).astype(np.float32),
        "blk.0.half.weight": generator.standard_normal((3, 5)).astype(np.float16),
        "token_embd.weight": generator.integers(0, 2**15, (4, 6), dtype=np.uint16).view(np.uint8),
        # 576 bytes, a multiple of the alignment: the file ends with its last byte.
        "blk.0.ffn_up_exps.weight": stacked,
    }
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve ☃")
    writer.add_array("a.strings", ["", "two", "drei"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.bools", [True, False])
    for name, array in data.items():
        raw = {"token_embd.weight": gguf.GGMLQuantizationType.BF16}.get(name)
        if name.endswith("exps.weight"):
            raw = NVFP4
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    return path, write_sample(path)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", kind, offset)


def assemble(
    pairs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = b"",
    *,
    head: bytes | None = None,
    alignment: int = 32,
) -> bytes:
    """A file by hand, so that anything in it can be wrong."""
    pairs, infos = pairs or [], infos or []
    if head is None:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs))
    header = head + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def expect_error(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)


# ------------------------------------------------------------------------- what is right


def test_reads_what_the_gguf_package_wrote(sample: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, data = sample
    with GGUFFile(path) as file:
        assert file.version == 3
        assert file.metadata == {
            "general.architecture": "flint",
            "a.u8": 200,
            "a.i64": -(2**40),
            "a.f32": 0.5,
            "a.f64": 0.1,
            "a.bool": True,
            "a.string": "naïve ☃",
            "a.strings": ["", "two", "drei"],
            "a.ints": [1, -2, 3],
            "a.floats": [0.5, -1.0],
            "a.bools": [True, False],
        }
        assert list(file.tensors) == list(data)
        for theirs in gguf.GGUFReader(path).tensors:
            ours = file.tensors[theirs.name]
            assert ours.type_id == theirs.tensor_type
            assert ours.type_name == theirs.tensor_type.name
            assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
            assert (ours.n_bytes, ours.offset) == (theirs.n_bytes, theirs.data_offset)
            raw = file.raw(theirs.name)
            assert raw.dtype == torch.uint8
            assert raw.numpy().tobytes() == data[theirs.name].tobytes()


def test_rows_and_typed_views(sample: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, data = sample
    file = GGUFFile(path)
    assert file.raw("blk.0.ffn_up_exps.weight").shape == (2, 4, 72)
    assert file.tensors["blk.0.ffn_up_exps.weight"].shape == (2, 4, 128)
    norm = file.tensor("blk.0.attn_norm.weight")
    np.testing.assert_array_equal(norm.numpy(), data["blk.0.attn_norm.weight"])
    half = file.tensor("blk.0.half.weight")
    assert half.dtype == torch.float16
    np.testing.assert_array_equal(half.numpy(), data["blk.0.half.weight"])
    embedding = file.tensor("token_embd.weight")
    assert (embedding.dtype, embedding.shape) == (torch.bfloat16, (4, 6))
    assert embedding.view(torch.int16).numpy().tobytes() == data["token_embd.weight"].tobytes()
    with pytest.raises(ValueError, match=r"'blk.0.ffn_up_exps.weight': got type NVFP4, want one"):
        file.tensor("blk.0.ffn_up_exps.weight")
    with pytest.raises(ValueError, match="tensor 'nothing': got none of that name"):
        file.raw("nothing")


def test_nvfp4_values_equal_the_gguf_packages(sample: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = sample
    name = "blk.0.ffn_up_exps.weight"
    theirs = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    want = gguf.quants.dequantize(theirs.data, NVFP4)
    with GGUFFile(path) as file:
        got = nvfp4.dequantize(*nvfp4.gguf_to_modelopt(file.raw(name)))
    np.testing.assert_array_equal(got.numpy(), want)


def test_every_type_of_the_gguf_package_is_known() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name == "Q8_1":  # 36 in ggml since its two fp32 became fp16; in no file
            continue
        assert GGML_TYPES[kind] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


def test_version_2_empty_files_scalars_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 2, 0, 0))
    assert (GGUFFile(path).version, GGUFFile(path).tensors) == (2, {})
    align = pair("general.alignment", UINT32, struct.pack("<I", 64))
    infos = [info("late", [2], 0, 64), info("scalar", [], 0, 0)]
    data = struct.pack("<f", 1.5) + bytes(60) + struct.pack("<2f", 2.0, 3.0)
    path.write_bytes(assemble([align], infos, data, alignment=64))
    file = GGUFFile(path)
    assert list(file.tensors) == ["late", "scalar"]  # the file's order, not the data's
    assert file.tensor("late").tolist() == [2.0, 3.0]
    assert file.tensor("scalar").shape == ()
    assert file.tensor("scalar").item() == 1.5


def test_the_last_tensors_padding_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble(infos=[info("t", [2], 0, 0)], data=struct.pack("<2f", 1, 2)))
    assert GGUFFile(path).tensor("t").tolist() == [1.0, 2.0]


def test_G4_read_only_file_with_warnings_as_errors(
    tmp_path: Path, sample: tuple[Path, dict[str, np.ndarray]]
) -> None:
    path = tmp_path / "read_only.gguf"
    content = sample[0].read_bytes()
    path.write_bytes(content)
    path.chmod(0o444)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with GGUFFile(path) as file:
            norm = file.tensor("blk.0.attn_norm.weight")
        gc.collect()
    # The tensor outlives the file object, and writing to it does not reach the file.
    norm.fill_(7.0)
    assert norm.tolist() == [7.0] * 7
    assert path.read_bytes() == content


def test_closed_files_and_release(sample: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, data = sample
    file = GGUFFile(path)
    raw = file.raw("blk.0.half.weight")
    file.release("blk.0.half.weight")
    assert raw.numpy().tobytes() == data["blk.0.half.weight"].tobytes()
    file.close()
    file.close()
    with pytest.raises(ValueError, match="the file is closed; open it again"):
        file.raw("blk.0.half.weight")


def test_G5_reading_tensor_by_tensor_keeps_one_in_memory(tmp_path: Path) -> None:
    """Eight tensors of 16 MiB: the peak grows by about one where each is released."""
    path, size = tmp_path / "big.gguf", 16 << 20
    infos = [info(f"t{index}", [size], 24, index * size) for index in range(8)]
    header = assemble(infos=infos)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 8 * size)
    script = """
import resource, sys, torch
from flint_kernels.formats.gguf import GGUFFile
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with GGUFFile(sys.argv[1]) as file:
    torch.ones(1 << 20, dtype=torch.uint8).view(torch.int64).sum()
    before = peak()
    for name in file.tensors:
        file.raw(name).view(torch.int64).sum()
        file.release(name)
    print(peak() - before)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert int(done.stdout) < 3 * (size >> 10)  # KiB


# ------------------------------------------------------------------------- what is wrong


def test_G2_cut_at_every_byte(tmp_path: Path, sample: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Every shorter file is an error that says where: section, key or tensor."""
    content = sample[0].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    infos = GGUFFile(path).tensors
    names = [*infos, *GGUFFile(path).metadata]
    data_start = min(tensor.offset for tensor in infos.values())
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut short") as error:
            GGUFFile(path)
        message = str(error.value)
        where = ("the header", "metadata key", "tensor info", *(repr(name) for name in names))
        assert any(place in message for place in where)
        if length >= data_start:
            damaged = next(n for n, t in infos.items() if length < t.offset + t.n_bytes)
            assert repr(damaged) in message


def test_G3_byte_swapped_files(tmp_path: Path) -> None:
    path = tmp_path / "big_endian.gguf"
    writer = gguf.GGUFWriter(path, "flint", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("t", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect_error(tmp_path, path.read_bytes(), r"byte-swapped \(big-endian\)")
    swapped = b"FUGG" + path.read_bytes()[4:]
    expect_error(tmp_path, swapped, r"byte-swapped \(big-endian\)")


def test_G6_types_and_names(tmp_path: Path) -> None:
    bad = [info("blk.0.x", [64], 99, 0)]
    expect_error(tmp_path, assemble(infos=bad, data=bytes(64)), "tensor 'blk.0.x': got type 99")
    twice = [info("blk.0.x", [8], 0, 0), info("blk.0.x", [8], 0, 32)]
    expect_error(tmp_path, assemble(infos=twice, data=bytes(64)), "'blk.0.x': got it twice")
    # A type that is not ours is the loader's to judge; the reader tells it the name.
    path = tmp_path / "q4_k.gguf"
    path.write_bytes(assemble(infos=[info("w", [256, 2], 12, 0)], data=bytes(288)))
    with GGUFFile(path) as file:
        assert (file.tensors["w"].type_name, file.raw("w").shape) == ("Q4_K", (2, 144))
        with pytest.raises(ValueError, match="tensor 'w': got type Q4_K, want one of F32"):
            file.tensor("w")


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"GGML" + bytes(60), r"got magic b'GGML', want b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "got GGUF version 1, want 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "got GGUF version 4"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"the header: got {HUGE} tensors, want at"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"the header: got {HUGE} metadata keys"),
        (assemble([struct.pack("<Q", HUGE) + bytes(90)]), f"metadata key 0 .*want {HUGE}"),
        (assemble([pair("k", STRING, struct.pack("<Q", HUGE))], data=bytes(99)), "key 'k': cut"),
        (assemble([pair("k", STRING, text(b"\xff\xfe"))]), "key 'k': got a string that is not UTF"),
        (assemble([pair("k", 13, bytes(8))]), "key 'k': got value type 13"),
        (assemble([pair("k", BOOL, b"\x02")]), "key 'k': got 2 for a bool"),
        (assemble([pair("k", ARRAY, struct.pack("<IQ", 0, HUGE))]), f"'k': got {HUGE} array"),
        (assemble([pair("k", ARRAY, struct.pack("<IQ", 8, HUGE))]), f"'k': got {HUGE} array"),
        (assemble([pair("k", ARRAY, struct.pack("<IQ", 9, HUGE))]), f"'k': got {HUGE} array"),
        (assemble([pair("k", ARRAY, struct.pack("<IQ", 77, 1))]), "'k': got element type 77"),
        (
            assemble([pair("k", ARRAY, struct.pack("<IQ", 9, 1) * 99 + bytes(99))]),
            "'k': got arrays nested deeper than 4",
        ),
        (assemble([pair("k", BOOL, b"\1"), pair("k", BOOL, b"\0")]), "key 'k': got it twice"),
        (assemble([pair("general.alignment", UINT32, struct.pack("<I", 24))]), "got 24, want a p"),
        (assemble([pair("general.alignment", UINT32, bytes(4))]), "got 0, want a power of two"),
        (assemble([pair("general.alignment", STRING, text("32"))]), "got '32', want a power"),
        (assemble(infos=[info("", [1], 0, 0)], data=bytes(32)), "tensor '': got an empty name"),
        (assemble(infos=[info("t", [1] * 5, 0, 0)], data=bytes(32)), "'t': got 5 dimensions"),
        (assemble(infos=[info("t", [0], 0, 0)], data=bytes(32)), "'t' .*got a dimension of 0"),
        (assemble(infos=[info("t", [65], 40, 0)], data=bytes(99)), "'t' .NVFP4 .*got 65 values a"),
        (assemble(infos=[info("t", [2**32] * 4, 0, 0)], data=bytes(32)), "'t' .*bytes of data"),
        (assemble(infos=[info("t", [9], 0, 0)], data=bytes(32)), "'t' .*cut short: got a file"),
        (assemble(infos=[info("t", [1], 0, 4)], data=bytes(32)), "'t' .*got offset 4, want a mul"),
        (assemble(infos=[info("t", [1], 0, 2**64 - 32)], data=bytes(32)), "'t' .*cut short"),
        (
            assemble(infos=[info("a", [9], 0, 0), info("b", [9], 0, 32)], data=bytes(99)),
            "'b' .*inside the tensor before it",
        ),
    ],
)
def test_damaged_and_hostile_headers(tmp_path: Path, content: bytes, match: str) -> None:
    expect_error(tmp_path, content, match)


def test_a_header_may_not_be_the_whole_of_a_huge_file(tmp_path: Path) -> None:
    """A sparse file of 1 TiB with one string of 1 GiB: refused before it is read."""
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(assemble([pair("k", STRING, struct.pack("<Q", 1 << 30))]))
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"key 'k': the header runs past {MAX_HEADER_BYTES} bytes"):
        GGUFFile(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "nothing.gguf")
    with pytest.raises(IsADirectoryError):
        GGUFFile(tmp_path)
    expect_error(tmp_path, b"", "the header is cut short: got 0 bytes")


def read_all(path: Path) -> Any:
    """Reads everything in a file, so that a wrong bound would fault."""
    with GGUFFile(path) as file:
        return [int(file.raw(name).sum()) for name in file.tensors]


@settings(
    deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_headers_are_errors_or_valid_files(
    tmp_path: Path, sample: tuple[Path, dict[str, np.ndarray]], data: st.DataObject
) -> None:
    content = bytearray(sample[0].read_bytes())
    header = min(tensor.offset for tensor in GGUFFile(sample[0]).tensors.values())
    interesting = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(interesting | st.integers(0, 255))
        content[at : at + width] = bytes([value]) * width
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_all(path)
    except ValueError as error:
        assert str(path) in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20  # the file has 1.5 KiB
