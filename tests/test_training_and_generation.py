"""The text, training on it, generation, and the choice of a device."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from sdm_compile.generation import TextStream, decode_differences, generate, sample
from sdm_compile.lm import LanguageModel, LMState
from sdm_compile.machine import pick_device
from sdm_compile.text import Corpus
from sdm_compile.training import TrainConfig, Trainer, evaluate, interrupts_held
from tests.lm_models import CONFIG, make_model

CPU = torch.device("cpu")
TEXT = b"".join(b"%d little bytes, and %d more of them. " % (i, i * i) for i in range(60))


@pytest.fixture
def model() -> LanguageModel:
    return make_model()


# The text


def test_default_text_is_the_help_topics() -> None:
    corpus = Corpus.load([])
    text = bytes(torch.cat([corpus.train, corpus.validation]).tolist())
    assert b"The \"assert\" statement" in text
    assert len(corpus.validation) == len(text) // 10 > 10_000


def test_own_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff" * 15)
    (tmp_path / "b").write_bytes(b"\x00" * 15)
    corpus = Corpus.load([tmp_path / "a", tmp_path / "b"])
    assert corpus.train.tolist() == [255] * 15 + [0] * 12
    assert corpus.validation.tolist() == [0] * 3
    assert corpus.digest != Corpus.load([tmp_path / "b", tmp_path / "a"]).digest


def test_short_text() -> None:
    with pytest.raises(ValueError, match="at least 20 bytes, got 3"):
        Corpus.from_bytes(b"abc")
    with pytest.raises(ValueError, match="too few for a window of 30"):
        Corpus.from_bytes(bytes(range(30))).batch(0, seed=0, batch=1, length=29)


def test_batches_are_windows_that_depend_on_seed_and_step() -> None:
    corpus = Corpus.from_bytes(bytes(range(200)))
    first = corpus.batch(3, seed=5, batch=4000, length=10)
    assert torch.equal(first, first[:, :1] + torch.arange(11))
    assert set(first[:, 0].tolist()) == set(range(170))  # every window of the training bytes, no other
    assert torch.equal(first, corpus.batch(3, seed=5, batch=4000, length=10))
    assert not torch.equal(first, corpus.batch(4, seed=5, batch=4000, length=10))
    assert not torch.equal(first, corpus.batch(3, seed=6, batch=4000, length=10))


# Training


def test_training_learns() -> None:
    trainer = Trainer(CONFIG, TrainConfig(steps=30, batch=4, length=32, lr=2e-2, warmup=3), CPU)
    corpus = Corpus.from_bytes(TEXT)
    before = evaluate(trainer.model, corpus.validation, 4, 32)
    for step in range(30):
        trainer.train_step(trainer.model, corpus)
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {trainer.config.learning_rate(step)}
    after = evaluate(trainer.model, corpus.validation, 4, 32)
    assert abs(before - 8) < 0.2
    assert after < 4.5


@pytest.mark.gpu
def test_training_on_a_gpu_goes_on_bit_for_bit() -> None:
    """A step is a replay there, but the first one after a start or a resumption: the bits are the same."""
    corpus = Corpus.from_bytes(TEXT)
    config = TrainConfig(steps=10, batch=4, length=32, lr=2e-2, warmup=3)

    def trained(steps: int, trainer: Trainer) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            loss = trainer.train_step(trainer.model, corpus)
            assert loss.isfinite()
        assert trainer._graph is not None and trainer._graph[1].captured == 1
        return {name: x.cpu().clone() for name, x in trainer.tensors().items()}

    whole = trained(10, Trainer(CONFIG, config, torch.device("cuda")))
    parts = trained(4, Trainer(CONFIG, config, torch.device("cuda")))
    resumed = Trainer(CONFIG, config, torch.device("cuda"))
    resumed.load_tensors(parts)
    resumed.step = 4
    parts = trained(6, resumed)
    assert whole.keys() == parts.keys()
    for name, x in whole.items():
        assert torch.equal(x, parts[name]), name


def test_evaluation_equals_the_full_forward(model: LanguageModel) -> None:
    text = torch.randint(256, (42,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    logits, _ = model(text[None, :-1].long())
    bits = F.cross_entropy(logits[0].float(), text[1:].long()).item() / math.log(2)
    assert evaluate(model, text, 1, 7) == pytest.approx(bits, rel=1e-6)  # a padded sixth segment
    # Two streams of 21 predictions: the second begins anew at byte 21.
    bits = (21 * evaluate(model, text[:22], 1, 7) + 20 * evaluate(model, text[21:], 1, 7)) / 41
    assert evaluate(model, text, 2, 7) == pytest.approx(bits, rel=1e-6)


def test_learning_rate() -> None:
    config = TrainConfig(steps=100, lr=1.0, warmup=10)
    rates = [config.learning_rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.525)
    assert rates[100] == pytest.approx(0.05)


def test_weight_decay_exceptions() -> None:
    trainer = Trainer(CONFIG, TrainConfig(weight_decay=0.3), CPU)
    decays = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        exempt = parameter.ndim < 2 or name == "embedding.weight" or name.endswith(("A_log", "dt_bias", "memory"))
        assert decays[id(parameter)] == (0.0 if exempt else 0.3), name


@pytest.mark.parametrize(
    "setting",
    [
        *({"steps": -1}, {"batch": 0}, {"length": 0}, {"lr": 0.0}, {"lr": math.nan}, {"seed": -1}, {"seed": 2**32}),
        *({"weight_decay": -1.0}, {"weight_decay": math.nan}),
    ],
)
def test_bad_training_settings(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        TrainConfig(**setting)


def test_interrupts_wait_for_the_block_to_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("never")
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Generation


def test_sampling() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))

    def frequencies(temperature: float, top_p: float) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        drawn = [sample(logits, temperature, top_p, generator) for _ in range(4000)]
        return [drawn.count(i) / 4000 for i in range(4)]

    assert frequencies(0, 1) == frequencies(1e-320, 1) == [0, 1, 0, 0]
    assert frequencies(1, 1) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)
    squares = [p * p / 0.345 for p in (0.1, 0.5, 0.15, 0.25)]
    assert frequencies(0.5, 1) == pytest.approx(squares, abs=0.03)
    assert frequencies(1, 0.7) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.03)
    assert frequencies(1, 0.3) == [0, 1, 0, 0]  # the likeliest stays, whatever it has


def test_generation_follows_the_model(model: LanguageModel) -> None:
    stream = generate(model, model, b"seed", temperature=0, top_p=1, seed=0)
    text = b"seed" + bytes(next(stream) for _ in range(12))
    logits, _ = model(torch.tensor([list(text)]))
    assert logits[0, 3:-1].argmax(-1).tolist() == list(text[4:])


def test_compiled_decode_loop_never_recompiles(model: LanguageModel) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    generated = generate(model, compiled, b"ab", temperature=1, top_p=1, seed=0)
    next(generated)
    assert counter.frame_count == 1
    for _ in range(20):
        next(generated)
    assert counter.frame_count == 1


def test_generation_settings(model: LanguageModel) -> None:
    for prompt, temperature, top_p, message in [
        (b"", 1, 1, "at least one byte"),
        (b"a", -1, 1, "temperature"),
        (b"a", math.nan, 1, "temperature"),
        (b"a", 1, 0, "top_p"),
        (b"a", 1, 1.5, "top_p"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, model, prompt, temperature, top_p, 0)


def test_text_stream() -> None:
    def pieces(text: str | bytes, *stops: str) -> list[str]:
        stream = TextStream(stops)
        data = text if isinstance(text, bytes) else text.encode()
        return [*(stream.feed(byte) for byte in data), stream.feed(None)]

    assert pieces("né") == ["n", "", "é", ""]
    assert pieces("né".encode()[:-1]) == ["n", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(b"a\xffb") == ["a", "\N{REPLACEMENT CHARACTER}", "b", ""]
    assert pieces("xaab", "aab") == ["x", "", "", "", ""]  # held back, then cut
    assert pieces("aaab", "aab") == ["", "", "a", "", ""]
    assert pieces("xaa", "aab") == ["x", "", "", "aa"]  # held back, then shown at the end
    assert pieces("one. two; three", "; ", ". ") == ["o", "n", "e", *[""] * 13]
    assert pieces("xab", "b", "ab") == ["x", "", "", ""]  # both end here; the longer begins first
    assert "".join(pieces("plain", "")) == "plain"


def test_decode_differences(model: LanguageModel) -> None:
    tokens = torch.randint(256, (30,), dtype=torch.uint8)
    assert decode_differences(model, model, tokens).shape == (15,)
    assert decode_differences(model, model, tokens).max() < 1e-6

    def forgetful(token: torch.Tensor, state: LMState) -> tuple[torch.Tensor, LMState]:
        logits, _ = model(token, model.init_state(1))
        return logits, state

    differences = decode_differences(model, forgetful, tokens)
    assert differences.min() > 1e-3


def test_devices() -> None:
    assert pick_device() == CPU
    assert pick_device("cpu") == CPU
    with pytest.raises(ValueError, match="cannot use device 'nowhere'"):
        pick_device("nowhere")
    with pytest.raises(ValueError, match="cannot use device 'meta': the ops have no kernels for it"):
        pick_device("meta")
