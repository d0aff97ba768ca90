"""Train flint-tiny: first in BF16, then quantisation-aware with the BF16 model as teacher.

    python -m flint_kernels.flint_tiny.train --data build/flint_tiny --output build/flint_tiny_run

writes into `--output`

    bf16/model.safetensors        the BF16 weights, HF names
    nvfp4/model.safetensors       the NVFP4 student in ModelOpt's layout
    training_log.json             configuration, corpus, machine, curves, final figures

Time, not steps, sets the schedule: `--minutes` of training and `--qat-minutes` of distillation end
when they should whatever the speed, and `--total-minutes` cuts training short when start-up took
long. `--steps` and `--qat-steps` count steps instead; with `--device cpu --steps 2 --qat-steps 2
--batch 2 --length 128 --eval-windows 2 --sample-tokens 4` the whole program takes seconds.

The learning rate is constant, then falls linearly to zero; the fall begins early when the
validation loss stops improving. The weights with the lowest validation loss are kept. Held-out
figures never decide anything. Final figures come from the written files, read back, with fp32
arithmetic.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from flint_kernels.flint_tiny.data import batches, load_tokens, windows
from flint_kernels.flint_tiny.model import (
    Parameters,
    TinyForward,
    initial_parameters,
    tiny_config,
)
from flint_kernels.flint_tiny.quantization import student_parameters, teacher_parameters
from flint_kernels.flint_tiny.tensors import load_bf16, load_nvfp4, save_bf16, save_nvfp4
from flint_kernels.model.config import FlintConfig

log = logging.getLogger(__name__)

Loss = Callable[[Parameters, Tensor, Tensor], tuple[Tensor, Tensor]]

# Seconds that reading back, the final figures and the sample may take after distillation.
FINISH_SECONDS = 25.0
CHECK_EVERY = 25
MAX_RESTARTS = 3


class Schedule:
    """Warm-up, constant rate, linear fall to zero; all as fractions of the stage's budget."""

    def __init__(self, warm_up: float, fall: float) -> None:
        self.warm_up = warm_up
        self.fall = fall
        self.fall_start = 1.0 - fall

    def factor(self, progress: float) -> float:
        rising = min(1.0, (progress + 1e-3) / self.warm_up)
        falling = 1.0 - max(0.0, progress - self.fall_start) / self.fall
        return max(0.0, min(rising, falling))

    def fall_now(self, progress: float) -> None:
        self.fall_start = min(self.fall_start, progress)

    def finished(self, progress: float) -> bool:
        return progress >= self.fall_start + self.fall


class Budget:
    """Progress of a stage from 0 to 1, by steps where they are given, else by time."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.seconds = minutes * 60
        self.steps = steps
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        return (time.monotonic() - self.start) / self.seconds


@dataclass
class Evaluation:
    """Mean loss in nats a token; share of each MoE layer's selections per expert [layers, E]."""

    loss: float
    load: Tensor


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of `targets` [B, T] under the head's logits for `hidden` [B, T, H]."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def distillation(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """(KL of the student's from the teacher's distributions, the student's cross entropy)."""
    student = F.log_softmax(F.linear(hidden, head.to(hidden.dtype)).float(), dim=-1)
    teacher = F.linear(teacher_hidden, teacher_head.to(teacher_hidden.dtype)).float()
    teacher = F.log_softmax(teacher, dim=-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1).mean()
    return divergence, -student.gather(-1, targets[..., None]).mean()


class Programs:
    """The compiled pieces, or the plain ones where compiling is off or fails."""

    def __init__(self, config: FlintConfig, compiled: bool) -> None:
        self.compiled = compiled
        self.forward = TinyForward(config, torch.bfloat16, compiled)

        def maybe(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self.cross_entropy = maybe(cross_entropy)
        self.distillation = maybe(distillation)

    def training_loss(self, dropout: float, balance_weight: float) -> Loss:
        rate: Tensor | None = None

        def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal rate
            if rate is None:
                rate = torch.tensor(dropout, device=inputs.device)
            hidden, balance, _ = self.forward.hidden(parameters, inputs, rate)
            value = self.cross_entropy(hidden, parameters["lm_head.weight"], targets)
            return value + balance_weight * balance, value.detach()

        return loss

    def distillation_loss(self, teacher: Parameters, entropy_weight: float) -> Loss:
        rate: Tensor | None = None

        def loss(parameters: Parameters, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal rate
            if rate is None:
                # The program of training with rate 0: compiling a second one would cost more.
                rate = torch.zeros((), device=inputs.device)
            with torch.no_grad():
                teacher_hidden, _, _ = self.forward.hidden(teacher, inputs)
            student = student_parameters(parameters)
            hidden, _, _ = self.forward.hidden(student, inputs, rate)
            divergence, entropy = self.distillation(
                hidden,
                student["lm_head.weight"],
                teacher_hidden,
                teacher["lm_head.weight"],
                targets,
            )
            return divergence + entropy_weight * entropy, divergence.detach()

        return loss

    @torch.no_grad()
    def evaluate(self, parameters: Parameters, data: Tensor, batch: int) -> Evaluation:
        """Mean loss over the windows `data` [n, T + 1]; all batches have one shape (compiled)."""
        total = torch.zeros((), device=data.device)
        loads = []
        for start in range(0, len(data), batch):
            part = data[start : start + batch]
            index = torch.arange(batch, device=data.device) % len(part)
            hidden, _, load = self.forward.hidden(parameters, part[index, :-1])
            hidden = hidden[: len(part)]
            logits = F.linear(hidden, parameters["lm_head.weight"].to(hidden.dtype)).float()
            total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            loads.append(load)
        loss = (total / (data.shape[0] * (data.shape[1] - 1))).item()
        return Evaluation(loss, torch.stack(loads).mean(0).cpu())


def trainable(parameters: Parameters) -> Parameters:
    return {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}


def make_optimizer(parameters: Parameters, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; norms, sinks and the embedding do not decay."""
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, value in parameters.items():
        decays = value.dim() > 1 and name != "model.embed_tokens.weight"
        (decaying if decays else others).append(value)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = decaying[0].is_cuda
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=fused)


@dataclass
class Stage:
    """What differs between training and distillation."""

    name: str
    minutes: float
    steps: int | None
    peak_rate: float
    weight_decay: float
    schedule: Schedule
    # Evaluations without improvement after which the learning rate falls.
    patience: int
    loss: Loss
    # What of the parameters is evaluated: themselves, or the quantised student.
    view: Callable[[Parameters], Parameters]


class Fit:
    """One stage: from given weights to those of the lowest validation loss.

    When a loss is not finite, or validation is worse by 1 nat than at its best, the weights and the
    optimiser go back to the last good evaluation and the rate is halved; RuntimeError after
    three times.
    """

    def __init__(
        self,
        stage: Stage,
        start: Parameters,
        programs: Programs,
        data: dict[str, Tensor],
        arguments: argparse.Namespace,
    ) -> None:
        self.stage = stage
        self.programs = programs
        self.data = data
        self.arguments = arguments
        self.parameters = trainable(start)
        self.optimizer = make_optimizer(self.parameters, stage.weight_decay)
        self.peak_rate = stage.peak_rate
        self.step = 0
        self.train_loss = torch.zeros(())
        self.curve: list[dict[str, float]] = []
        self.best: Parameters = {}
        self.best_loss = math.inf
        self.stale = 0
        self.restarts = 0
        self.good: tuple[Parameters, dict[str, Any]] | None = None

    def run(self) -> Parameters:
        """Returns the best fp32 weights; `curve` has the evaluations."""
        arguments, stage = self.arguments, self.stage
        stream = batches(self.data["train"], arguments.batch, arguments.length, arguments.seed)
        self.budget = Budget(stage.minutes, stage.steps)
        progress = 0.0
        self.evaluate(progress)
        while not stage.schedule.finished(progress):
            self.update(progress, *next(stream))
            progress = self.budget.progress(self.step)
            sound = self.step % CHECK_EVERY != 0 or bool(torch.isfinite(self.train_loss))
            if sound and time.monotonic() - self.last_evaluation > arguments.eval_seconds:
                sound = self.evaluate(progress)
            if not sound:
                self.go_back()
        if self.curve[-1]["step"] != self.step and not self.evaluate(progress):
            log.warning("%s: the end diverged; an earlier evaluation is the best", stage.name)
        return self.best

    def update(self, progress: float, inputs: Tensor, targets: Tensor) -> None:
        """One step of the optimiser."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_rate * self.stage.schedule.factor(progress)
        loss, self.train_loss = self.stage.loss(self.parameters, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def evaluate(self, progress: float) -> bool:
        """Add a point to the curve, keep the best weights; False where the model has diverged."""
        with torch.no_grad():
            viewed = self.stage.view(self.parameters)
        batch = self.arguments.batch
        validation = self.programs.evaluate(viewed, self.data["validation"], batch)
        held_out = self.programs.evaluate(viewed, self.data["held_out"], batch)
        self.last_evaluation = time.monotonic()
        self.curve.append(
            {
                "step": self.step,
                "tokens": self.step * batch * self.arguments.length,
                "seconds": round(self.last_evaluation - self.budget.start, 2),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "train_loss": round(self.train_loss.item(), 5),
                "validation_loss": round(validation.loss, 5),
                "held_out_loss": round(held_out.loss, 5),
                "smallest_expert_load": round(validation.load.min().item(), 5),
            }
        )
        log.info("%s %.0f%%: %s", self.stage.name, 100 * progress, json.dumps(self.curve[-1]))
        if not math.isfinite(validation.loss) or validation.loss > self.best_loss + 1.0:
            return False
        weights = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.good = (weights, copy.deepcopy(self.optimizer.state_dict()))
        if validation.loss < self.best_loss:
            self.best_loss, self.best, self.stale = validation.loss, weights, 0
        else:
            self.stale += 1
            if self.stale >= self.stage.patience:
                self.stage.schedule.fall_now(progress)
        return True

    def go_back(self) -> None:
        """Return to the last good evaluation with half the learning rate."""
        self.restarts += 1
        if self.good is None or self.restarts > MAX_RESTARTS:
            raise RuntimeError(
                f"{self.stage.name}: the loss diverged {self.restarts} times, wanted a finite, "
                f"falling one; lower the learning rate (it was {self.stage.peak_rate})"
            )
        self.peak_rate /= 2
        log.warning("%s: diverged at step %d, rate halved", self.stage.name, self.step)
        weights, optimizer_state = self.good
        with torch.no_grad():
            for name, value in weights.items():
                self.parameters[name].copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer_state))


def warm_up(
    config: FlintConfig,
    parameters: Parameters,
    data: dict[str, Tensor],
    arguments: argparse.Namespace,
) -> Programs:
    """Compile everything that the run needs and hold it to the plain programs.

    Falls back to the plain programs, with a warning, when compiling fails or disagrees.
    """
    plain = Programs(config, compiled=False)
    if arguments.no_compile:
        return plain
    inputs, targets = next(batches(data["train"], arguments.batch, arguments.length, 0))
    programs = Programs(config, compiled=True)
    try:
        teacher = teacher_parameters(parameters)
        results = []
        for candidate in (plain, programs):
            weights = trainable(parameters)
            loss, _ = candidate.training_loss(0.0, arguments.balance)(weights, inputs, targets)
            loss.backward()
            gradient = weights["model.layers.0.self_attn.q_proj.weight"].grad
            assert gradient is not None
            results.append((loss.item(), gradient.float().norm().item()))
        weights = trainable(parameters)
        loss, _ = programs.distillation_loss(teacher, 0.1)(weights, inputs, targets)
        loss.backward()
        programs.evaluate(parameters, data["validation"], arguments.batch)
        log.info("loss and gradient norm, plain %s, compiled %s", *results)
        for expected, found in zip(*results, strict=True):
            if not math.isclose(expected, found, rel_tol=0.03):
                raise RuntimeError(f"compiled programs gave {results[1]}, plain {results[0]}")
    except Exception:
        log.exception("compiling failed; going on without it")
        return plain
    return programs


@torch.no_grad()
def mean_divergence(
    forward: TinyForward, reference: Parameters, other: Parameters, data: Tensor
) -> float:
    """Mean KL, in nats, of `other`'s next-token distributions from `reference`'s over `data`."""
    total = 0.0
    for window in data.split(8):
        first = F.log_softmax(forward.logits(reference, window[:, :-1]).float(), dim=-1)
        second = F.log_softmax(forward.logits(other, window[:, :-1]).float(), dim=-1)
        total += (first.exp() * (first - second)).sum(-1).sum().item()
    return total / (data.shape[0] * (data.shape[1] - 1))


@torch.no_grad()
def sample(
    forward: TinyForward, parameters: Parameters, tokenizer: Tokenizer, prompt: str, count: int
) -> str:
    """`prompt` and `count` tokens sampled with the model's defaults: top-k 20, top-p 0.95."""
    device = parameters["lm_head.weight"].device
    generator = torch.Generator().manual_seed(0)
    ids = [0, *tokenizer.encode(prompt).ids]
    for _ in range(count):
        tokens = torch.tensor([ids[-1024:]], device=device)
        logits = forward.logits(parameters, tokens)[0, -1].float().cpu()
        value, index = logits.softmax(-1).topk(20)
        value = value * (value.cumsum(-1) - value < 0.95)
        ids.append(int(index[torch.multinomial(value, 1, generator=generator)]))
    return tokenizer.decode(ids[1:], skip_special_tokens=False)


def load_entropy(load: Tensor) -> list[float]:
    """Entropy of each layer's expert load over that of an even one: 1 is perfectly spread."""
    entropy = -(load * load.clamp_min(1e-12).log()).sum(-1) / math.log(load.shape[-1])
    return [round(value, 4) for value in entropy.tolist()]


def final_figures(
    config: FlintConfig,
    master: Parameters,
    data: dict[str, Tensor],
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Losses and perplexities with fp32 arithmetic of the master weights and of both files."""
    programs = Programs(config, compiled=False)
    programs.forward = TinyForward(config, torch.float32, compile_blocks=False)
    files = {
        "bf16": load_bf16(arguments.output / "bf16" / "model.safetensors"),
        "nvfp4": load_nvfp4(arguments.output / "nvfp4" / "model.safetensors"),
    }
    for name, parameters in files.items():
        files[name] = {key: value.to(device) for key, value in parameters.items()}
    # Rounding after training, without distillation: what the second stage is worth.
    with torch.no_grad():
        rounded = student_parameters(master)
    candidates = {"fp32_master": master, "nvfp4_without_distillation": rounded, **files}
    figures: dict[str, Any] = {}
    for name, parameters in candidates.items():
        for part in ("validation", "held_out"):
            result = programs.evaluate(parameters, data[part], 8)
            figures.setdefault(name, {})[part] = {
                "loss": result.loss,
                "perplexity": math.exp(result.loss),
                "expert_load_entropy": load_entropy(result.load),
                "smallest_expert_load": result.load.min().item(),
            }
    ratio = figures["nvfp4"]["held_out"]["perplexity"] / figures["bf16"]["held_out"]["perplexity"]
    figures["nvfp4_over_bf16_held_out_perplexity"] = ratio
    figures["nvfp4_from_bf16_held_out_kl"] = mean_divergence(
        programs.forward, files["bf16"], files["nvfp4"], data["held_out"]
    )
    figures["largest_weight"] = {
        name: {
            key: round(value.abs().max().item(), 3)
            for key, value in parameters.items()
            if not key.endswith("norm.weight")
        }
        for name, parameters in files.items()
    }
    tokenizer = Tokenizer.from_file(str(arguments.data / "tokenizer.json"))
    figures["samples"] = {
        name: sample(programs.forward, parameters, tokenizer, "class ", arguments.sample_tokens)
        for name, parameters in files.items()
    }
    return figures


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both stages and the final figures; writes everything that the module's docstring lists."""
    begin = time.monotonic()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # One program for each kind of block, with and without gradients, is more than the default 8.
    torch._dynamo.config.recompile_limit = 64
    config = tiny_config()
    arguments.output.mkdir(parents=True, exist_ok=True)
    data = {"train": load_tokens(arguments.data / "train.npy", device)}
    for part in ("validation", "held_out"):
        tokens = load_tokens(arguments.data / f"{part}.npy", device)
        data[part] = windows(tokens, arguments.length, arguments.eval_windows)
    start = initial_parameters(config, arguments.seed, device)
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(value.numel() for value in start.values()),
        "config": config.to_dict(),
        # Where the run read and wrote is of one machine alone.
        "arguments": {
            key: value for key, value in vars(arguments).items() if not isinstance(value, Path)
        },
        "corpus": json.loads((arguments.data / "corpus.json").read_text(encoding="utf-8")),
    }

    def write_record() -> None:
        text = json.dumps(record, indent=1)
        (arguments.output / "training_log.json").write_text(text + "\n", encoding="utf-8")

    programs = warm_up(config, start, data, arguments)
    record["compiled"] = programs.compiled
    record["start_up_seconds"] = round(time.monotonic() - begin, 1)
    log.info("start-up took %.1f s", record["start_up_seconds"])
    left = arguments.total_minutes - (time.monotonic() - begin + FINISH_SECONDS) / 60
    minutes = min(arguments.minutes, left - arguments.qat_minutes)
    if arguments.steps is None and minutes <= 0:
        raise RuntimeError(
            f"total_minutes: {arguments.total_minutes} leave no time for training after "
            f"{record['start_up_seconds']} s of start-up; raise it or pass --no-compile"
        )
    training = Stage(
        name="training",
        minutes=minutes,
        steps=arguments.steps,
        peak_rate=arguments.rate,
        weight_decay=arguments.weight_decay,
        schedule=Schedule(warm_up=0.02, fall=0.4),
        patience=4,
        loss=programs.training_loss(arguments.dropout, arguments.balance),
        view=lambda parameters: {name: value.detach() for name, value in parameters.items()},
    )
    fit = Fit(training, start, programs, data, arguments)
    master = fit.run()
    record["training"] = fit.curve
    save_bf16(master, arguments.output / "bf16" / "model.safetensors")
    write_record()

    quantization = Stage(
        name="distillation",
        minutes=arguments.qat_minutes,
        steps=arguments.qat_steps,
        peak_rate=arguments.qat_rate,
        weight_decay=0.0,
        schedule=Schedule(warm_up=0.05, fall=0.95),
        patience=10**9,
        loss=programs.distillation_loss(teacher_parameters(master), entropy_weight=0.1),
        view=lambda parameters: {
            name: value.detach() for name, value in student_parameters(parameters).items()
        },
    )
    fit = Fit(quantization, master, programs, data, arguments)
    student = fit.run()
    record["distillation"] = fit.curve
    save_nvfp4(student, arguments.output / "nvfp4" / "model.safetensors")
    write_record()

    record["final"] = final_figures(config, master, data, arguments, device)
    record["total_seconds"] = round(time.monotonic() - begin, 1)
    write_record()
    return record


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="what `corpus` wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--qat-minutes", type=float, default=1.0)
    parser.add_argument("--total-minutes", type=float, default=7.6)
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--qat-steps", type=int, help="instead of --qat-minutes")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--qat-rate", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-seconds", type=float, default=12.0)
    parser.add_argument("--eval-windows", type=int, help="evaluate on the first windows only")
    parser.add_argument("--sample-tokens", type=int, default=300)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    final = run(parse())["final"]
    log.info(json.dumps({key: final[key] for key in final if key != "largest_weight"}, indent=1))


if __name__ == "__main__":
    main()
