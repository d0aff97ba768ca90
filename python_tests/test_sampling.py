"""Sampling: the generator's known answers, every boundary, and the drawn distribution."""

from __future__ import annotations

import math

import pytest
import torch
from op_samples import int32, randn, rng, strided

from flint_kernels import ops
from flint_kernels.backends import gpu_general, native, native_cpu
from flint_kernels.backends.cpu import reference_body
from flint_kernels.reference.sampling import philox_4x32_10, uniform

INF, NAN = math.inf, math.nan


def draw(
    logits: torch.Tensor | list[list[float]],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    offset: int = 0,
) -> list[int]:
    logits = torch.as_tensor(logits, dtype=torch.float32)
    rows = logits.shape[0]
    return ops.sample(
        logits,
        torch.full((rows,), float(temperature)),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), float(top_p)),
        torch.full((rows,), seed),
        torch.arange(offset, offset + rows),
    ).tolist()


def draws(logits: list[float], count: int, seed: int, **settings: float) -> torch.Tensor:
    """How often each token comes in `count` draws (one call, one row a draw)."""
    rows = torch.tensor(logits).expand(count, -1)
    tokens = draw(rows, seed=seed, offset=1 << 33, **settings)  # type: ignore[arg-type]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


# ------------------------------------------------------------------ Philox4x32-10


@pytest.mark.parametrize(
    "counter,key,want",
    [  # Random123's kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    words = [tuple(int(word, 16) for word in text.split()) for text in (key, counter, want)]
    assert philox_4x32_10(words[0], words[1]) == words[2]  # type: ignore[arg-type]


def test_the_uniform_number_is_as_documented() -> None:
    x0, x1 = 0x6627E8D5, 0xE169C58D  # seed 0, offset 0: the first known answer
    assert uniform(0, 0) == ((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53
    # Key and counter are the 64-bit values' words, low first, negative ones in two's complement.
    seed, offset = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    x0, x1, _, _ = philox_4x32_10((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0, 0))
    assert uniform(seed, offset) == ((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53
    assert uniform(-1, -2) == uniform(2**64 - 1, 2**64 - 2)
    numbers = torch.tensor([uniform(7, i) for i in range(4000)], dtype=torch.float64)
    assert 0 <= float(numbers.min()) < 0.002
    assert 0.998 < float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=5 * 12**-0.5 / 4000**0.5)


# ------------------------------------------------------------------ greedy, ties, boundaries


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = [[1.0, 3.0, 2.0], [5.0, 5.0, 5.0], [-INF, -2.0, -2.0], [0.0, -0.0, 0.0]]
    assert draw(logits, temperature=0) == [1, 0, 1, 0]
    assert draw(logits, temperature=0, top_k=2, top_p=0.1) == [1, 0, 1, 0]
    wide = randn(3, 1000, dtype=torch.float32)
    assert draw(wide, temperature=0) == wide.argmax(dim=1).tolist()
    assert draw(wide, top_k=1) == wide.argmax(dim=1).tolist()
    assert draw(wide, top_p=1e-9) == wide.argmax(dim=1).tolist()
    assert draw(wide, temperature=1e-30) == wide.argmax(dim=1).tolist()


def seen(logits: list[float], **settings: float) -> set[int]:
    counts = draws(logits, 400, seed=3, **settings)
    return set(counts.nonzero().flatten().tolist())


def test_top_k_keeps_k_and_settles_ties_by_token() -> None:
    flat = [1.0] * 8
    assert seen(flat, top_k=3) == {0, 1, 2}
    assert seen(flat, top_k=8) == seen(flat, top_k=9) == seen(flat) == set(range(8))
    mixed = [0.0, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5, -9.0]
    assert seen(mixed, top_k=3) == {1, 3, 5}
    assert seen(mixed, top_k=4) == {1, 2, 3, 5}
    assert seen(mixed, top_k=5) == {1, 2, 3, 4, 5}


def test_top_p_keeps_what_begins_below_it() -> None:
    """Four equal logits: probabilities of exactly 1/4, so every boundary is exact."""
    flat = [2.0] * 4
    below = float(torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)))
    above = float(torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)))
    assert seen(flat, top_p=0.25) == {0}
    assert seen(flat, top_p=below) == {0, 1}
    assert seen(flat, top_p=0.5) == {0, 1}
    assert seen(flat, top_p=above) == {0, 1, 2}
    assert seen(flat, top_p=1.0) == {0, 1, 2, 3}
    # top-p sees the probabilities among the top-k: of two equal ones the second begins at 1/2.
    assert seen(flat, top_k=2, top_p=0.5) == {0}
    assert seen(flat, top_k=2, top_p=above) == {0, 1}
    # And those after the temperature: at 1/2, e^-1 becomes e^-2.
    pair = [1.0, 0.0]  # 0.731 and 0.269; at temperature 1/2, 0.881 and 0.119
    assert seen(pair, top_p=0.8) == {0, 1}
    assert seen(pair, top_p=0.8, temperature=0.5) == {0}


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (3, 1.0), (5, 0.8), (0, 0.6)])
def test_a_draw_is_where_the_cumulative_probability_first_exceeds_u(
    top_k: int, top_p: float
) -> None:
    """Row by row against a plain reading of the documentation, in Python's own floats."""
    logits = randn(200, 9, seed=1, dtype=torch.float32, scale=2.0)
    logits[::3, 4] = logits[::3, 2]  # ties
    got = draw(logits, temperature=0.7, top_k=top_k, top_p=top_p, seed=11, offset=5)
    temperature, top_p = (float(torch.tensor(value)) for value in (0.7, top_p))
    for row, token in enumerate(got):
        values = logits[row].tolist()
        order = sorted(range(9), key=lambda i, values=values: (-values[i], i))[: top_k or 9]
        weights = [math.exp((values[i] - values[order[0]]) / temperature) for i in order]
        chances = [weight / sum(weights) for weight in weights]
        kept = sum(sum(chances[:i]) < top_p for i in range(len(order)))
        u = uniform(11, 5 + row) * sum(chances[:kept])
        assert token == order[next(i for i in range(kept) if sum(chances[: i + 1]) > u)]


@pytest.mark.parametrize("vocabulary", [1, 2, 33, 1000])
def test_the_library_draws_the_tokens_of_the_pytorch_body(vocabulary: int) -> None:
    """Ties, NaN and infinities in a tenth of the logits; every kind of setting, mixed."""
    assert native.is_available()
    rows = 600
    logits = randn(rows, vocabulary, seed=5, dtype=torch.float32, scale=3.0)
    logits = logits.to(torch.bfloat16).float()  # ties
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0])
    pick = torch.randint(50, logits.shape, generator=rng(1))
    logits = torch.where(pick < 5, special[pick.clamp_max(4)], logits)
    logits[:, 0] = logits[:, 0].nan_to_num(0.5, 0.5, 0.5)  # a candidate in each row

    def choices(seed: int, *values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=rng(seed))]

    arguments = {
        "logits": logits,
        "temperature": choices(2, 0.0, 1e-30, 0.7, 1.0, 3.0),
        "top_k": choices(3, 0, 1, 2, 20, 999, 5000).to(torch.int32),
        "top_p": choices(4, 1e-9, 0.3, 0.95, 1.0),
        "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng(6)),
        "offset": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rng(7)),
    }
    want = reference_body("sample")(**arguments)
    assert torch.equal(native_cpu.body("sample")(**arguments), want)
    assert torch.equal(ops.sample(**arguments), want)


# ------------------------------------------------------------------ the distribution


def chance_of_as_bad_a_fit(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The upper tail of chi-square, as a regularised incomplete gamma function."""
    used = probabilities > 0
    assert not counts[~used].any()
    expected = probabilities[used] * counts.sum()
    statistic = ((counts[used] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(used.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


LOGITS = [2.0, 1.5, 1.5, 1.0, 0.0, -0.5, -1.0, 0.7, 2.0, -2.0]


@pytest.mark.parametrize(
    "seed,settings",
    [
        (1, {}),
        (2, {"temperature": 0.6}),
        (-3, {"top_k": 4}),
        (2**62 + 5, {"temperature": 1.5, "top_k": 8, "top_p": 0.9}),
    ],
)
def test_chi_square(seed: int, settings: dict[str, float]) -> None:
    """3,000 draws each; the seeds are fixed, so this passes always or never."""
    logits = torch.tensor(LOGITS, dtype=torch.float64) / settings.get("temperature", 1.0)
    order = torch.sort(logits, descending=True, stable=True).indices
    order = order[: int(settings.get("top_k", 10))]
    chances = torch.softmax(logits[order], dim=0)
    kept = int(((chances.cumsum(0) - chances) < settings.get("top_p", 1.0)).sum())
    probabilities = torch.zeros_like(logits)
    probabilities[order[:kept]] = chances[:kept] / chances[:kept].sum()
    counts = draws(LOGITS, 3_000, seed, **settings).double()
    assert chance_of_as_bad_a_fit(counts, probabilities) > 1e-4
    # The test can tell: the same draws do not fit a distribution up to 30% off.
    skewed = probabilities * torch.linspace(0.7, 1.3, 10)
    assert chance_of_as_bad_a_fit(counts, skewed / skewed.sum()) < 1e-4


@pytest.mark.parametrize("seed", [0, 1, -(2**40), 2**63 - 1])
def test_chi_square_of_a_million_draws(seed: int) -> None:
    """With the model's own settings, which the sampler gives: the tokens, kept and how often."""
    assert native.is_available()
    count = 1_000_000
    logits = randn(300, seed=11, dtype=torch.float32) * 2
    top = logits.double().sort(descending=True, stable=True)
    chances = torch.softmax(top.values[:20], dim=0)
    kept = int(((chances.cumsum(0) - chances) < 0.95).sum())
    assert 5 < kept < 20
    probabilities = torch.zeros(300, dtype=torch.float64)
    probabilities[top.indices[:kept]] = chances[:kept] / chances[:kept].sum()
    counts = torch.zeros(300, dtype=torch.float64)
    part = 100_000
    for first in range(0, count, part):
        tokens = ops.sample(
            logits.expand(part, -1),
            torch.ones(part),
            torch.full((part,), 20, dtype=torch.int32),
            torch.full((part,), 0.95),
            torch.full((part,), seed),
            torch.arange(first, first + part),
            max_top_k=20,
        )
        counts += torch.bincount(tokens, minlength=300)
    assert chance_of_as_bad_a_fit(counts, probabilities) > 1e-3
    # The test can tell: the same draws do not fit what is a few percent off.
    skewed = probabilities * torch.linspace(0.95, 1.05, 300)
    assert chance_of_as_bad_a_fit(counts, skewed / skewed.sum()) < 1e-3


def test_a_promise_of_few_candidates_changes_no_token() -> None:
    logits = randn(40, 500, dtype=torch.float32) * 3
    rest = torch.full((40,), 0.95), torch.arange(40), torch.arange(40)
    arguments = (logits, torch.linspace(0, 2, 40), torch.full((40,), 20, dtype=torch.int32), *rest)
    want = ops.sample(*arguments)
    assert torch.equal(ops.sample(*arguments, max_top_k=20), want)
    assert torch.equal(gpu_general.sample(*arguments, max_top_k=32), want)
    # On a GPU, which does not look, a row that breaks it has no token.
    assert gpu_general.sample(*arguments, max_top_k=19).tolist() == [int(want[0]), *[-1] * 39]


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = randn(6, 50, dtype=torch.float32)
    settings = (
        torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0]),
        int32(20, 0, 1, 7, 0, 20),
        torch.tensor([0.95, 1.0, 0.5, 0.9, 1.0, 0.95]),
        torch.tensor([1, 2, -3, 4, 1, 1]),
        torch.tensor([0, 5, 2**40, 7, 8, -1]),
    )
    whole = ops.sample(logits, *settings)
    assert torch.equal(ops.sample(strided(logits), *settings), whole)
    for row in range(6):
        part = slice(row, row + 1)
        assert ops.sample(logits[part], *(s[part] for s in settings)) == whole[row]
    assert ops.sample(logits[:0], *(s[:0] for s in settings)).shape == (0,)
    # Other seeds and other offsets draw other numbers.
    flat = torch.zeros(64, 1000)
    same = draw(flat, seed=1)
    assert same == draw(flat, seed=1)
    assert len(set(same)) > 50
    assert same != draw(flat, seed=2)
    assert same[1:] == draw(flat, seed=1, offset=1)[:-1]


# ------------------------------------------------------------------ NaN and infinity


def test_nan_counts_as_minus_infinity_and_inf_as_the_largest() -> None:
    poisoned = [NAN, 0.0, -INF, 0.0, NAN, -INF]
    assert seen(poisoned) == {1, 3}
    assert seen(poisoned, top_k=4) == {1, 3}
    assert draw([poisoned], temperature=0) == [1]
    assert seen([0.0, INF, 5.0, INF]) == {1, 3}
    assert seen([0.0, INF, 5.0, INF], top_k=1) == {1}
    assert draw([[NAN, 1.0, INF, NAN]], temperature=0) == [2]
    assert seen([-3e38, 3e38, -INF], temperature=1e-30) == {1}


@pytest.mark.parametrize("row", [[NAN, NAN], [-INF, -INF], [NAN, -INF]])
def test_a_row_without_candidates_is_an_error(row: list[float]) -> None:
    with pytest.raises(ValueError, match=r"flint::sample.*'logits'.*without a single candidate"):
        draw([[0.0, 1.0], row])


@pytest.mark.parametrize(
    "settings,argument",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": NAN}, "top_p"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], argument: str) -> None:
    with pytest.raises(ValueError, match=f"flint::sample: argument '{argument}': got .* want"):
        draw([[0.0, 1.0]], **settings)  # type: ignore[arg-type]
