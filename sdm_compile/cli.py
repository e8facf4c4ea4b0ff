"""The command line: `python -m sdm_compile [train | generate | doctor]`; without a command, the main job: `train`."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from .checkpoint import CHECKPOINT, Checkpoint, load_language_model
from .doctor import examine
from .generation import TextStream, decode_differences, generate
from .lm import LanguageModel, LMConfig
from .machine import describe_device, pick_device, why_not_compile
from .text import Corpus
from .training import Forward, TrainConfig, Trainer, evaluate, interrupts_held

INTERRUPTED = 130  # the exit status that shells give a process ended by Ctrl-C
BROKEN_PIPE = 141  # and one that wrote to a pipe which nobody reads any more
SAMPLE_PROMPT = "The "

CHECKED_TOKENS = 256  # of the validation text, for decode against full forward
DECODE_TOLERANCE = 1e-3  # of log-probabilities; rounding alone gives 1e-5
# Share of the bytes that may be beyond it: where two slots score the same to within rounding, the two ways may take
# different ones, whose contents differ. That is rare; a wrong decode shows in nearly every byte.
NEAR_TIES = 0.05

# Every setting of a run is an option of `train`, named like its field; this is what --help says of each.
TRAINING_HELP = {
    "steps": "optimizer steps",
    "batch": "windows per step",
    "length": "bytes per window",
    "lr": "highest learning rate",
    "warmup": "steps until the highest learning rate",
    "weight_decay": "weight decay of the matrices",
    "seed": "of the initial weights and of the windows",
}
MODEL_HELP = {
    "dim": "width of the model",
    "num_layers": "number of blocks",
    "hidden_dim": "width of the MLPs",
    "conv_width": "tokens that the convolution sees",
    "num_heads": "heads of an SDM layer",
    "slots_per_head": "memory slots of a head, a square",
    "num_writes": "slots that a token writes in each head",
    "num_reads": "slots that a token reads in each head",
    "chunk_size": "tokens computed together",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status.

    Args:
        argv: the arguments; None for the process's own.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["train", *arguments]
    args = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # generated text may hold what the terminal cannot show
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def run() -> int:
    """`main` for a process of its own, which ends quietly when nobody reads its output any more, as after `| head`."""
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:  # as it is where it was closed
                sys.stdout.flush()
    except BrokenPipeError:
        if _has_reader(sys.stdout):  # another pipe broke
            raise
        with open(os.devnull, "w") as nowhere:  # or what is left would be written at the end, and fail
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return BROKEN_PIPE


def _has_reader(stream: TextIO) -> bool:
    """Whether a stream still takes a line."""
    try:
        print(file=stream, flush=True)
    except BrokenPipeError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sdm_compile",
        description="A small byte-level language model of Sparse Delta Memory layers. "
        "Without a command: train it; the options are those of train.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="train | generate | doctor")
    _add_train(commands)
    _add_generate(commands)
    command = commands.add_parser(
        "doctor",
        help="say what this machine has and check the ops on it",
        description="Says what this machine has, and checks the ops on it against the reference. The exit status is 0 "
        "where they agree and 1 where they do not.",
    )
    command.add_argument("--device", help="where to check the ops (default: cpu)")
    command.set_defaults(run=_doctor)
    return parser


def _add_train(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train a model, generate a sample, report",
        description="Trains a model on text, generates a sample token by token, checks that decoding equals the full "
        "forward, and prints one summary line. Ctrl-C leaves a checkpoint, which --resume continues from.",
    )
    add = command.add_argument
    add("--out", type=Path, default=Path("sdm-run"), help="folder of the checkpoint (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint; --steps may change, and where the text is")
    add("--save-every", type=_at_least(1), default=50, metavar="N", help="steps between saves (default: %(default)s)")
    add("--sample", type=_at_least(0), default=200, metavar="N", help="bytes of the sample (default: %(default)s)")
    add("--no-compile", action="store_true", help="run without torch.compile")
    add("--device", help="where to run (default: cpu)")
    settings = command.add_argument_group("training settings")
    settings.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="text to learn from, its last tenth kept for validation (default: the help topics that Python carries)",
    )
    _add_fields(settings, TrainConfig, TRAINING_HELP)
    _add_fields(command.add_argument_group("model settings"), LMConfig, MODEL_HELP)
    command.set_defaults(run=_train)


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continues a text with a trained model, shown byte by byte as it is made.",
    )
    add = command.add_argument
    add(
        "--checkpoint",
        type=Path,
        default=Path("sdm-run", CHECKPOINT),
        help="file or run's folder (default: %(default)s)",
    )
    add("--prompt", default=SAMPLE_PROMPT, help="text to continue (default: %(default)r)")
    add("--max-tokens", type=_at_least(0), default=400, metavar="N", help="bytes at most (default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest byte (default: %(default)s)")
    add("--top-p", type=float, default=0.95, help="draw among the likeliest bytes of this total (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--compile", action="store_true", help="compile first, which pays for long texts")
    add("--device", help="where to run (default: cpu)")
    command.set_defaults(run=_generate)


def _add_fields(group: Any, config: type, helps: dict[str, str]) -> None:
    """One option per field; only those given end up in the parsed arguments."""
    for field in fields(config):
        if field.name in helps:
            group.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default),
                default=argparse.SUPPRESS,
                metavar="X" if isinstance(field.default, float) else "N",
                help=f"{helps[field.name]} (default: {field.default})",
            )


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a number from the command line, none below `least`."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


@contextmanager
def _refusals() -> Iterator[None]:
    """Around what is asked of the user: a wrong setting or file ends the program with a message, not a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # see `run`
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _forward(model: LanguageModel, compiled: bool) -> Forward:
    """The model, compiled whole where that is wanted and possible."""
    if not compiled:
        return model
    reason = why_not_compile()
    if reason is not None:
        print(f"{reason}: running uncompiled")
        return model
    return torch.compile(model, fullgraph=True, dynamic=False)


def _train(args: argparse.Namespace) -> int:
    path = args.out / CHECKPOINT
    with _refusals():
        trainer, corpus = _resumed_run(args, path) if args.resume else _new_run(args, path)
    model, config = trainer.model, trainer.config
    try:
        if not args.resume:
            _keep_previous(path)
        forward = _forward(model, not args.no_compile)
        if trainer.start_bits is None:
            trainer.start_bits = evaluate(model, corpus.validation, config.batch, config.length)
        speed = _learn(trainer, corpus, forward, path, args.save_every)
        end_bits = evaluate(model, corpus.validation, config.batch, config.length)
        if not math.isfinite(end_bits):
            raise SystemExit(f"error: the run diverged: {end_bits} validation bits/byte; try a lower --lr")
        _checkpoint(trainer, corpus).save(path)
    except (KeyboardInterrupt, BrokenPipeError) as stop:  # of Ctrl-C, `tee` may end before this does
        with interrupts_held():
            _checkpoint(trainer, corpus).save(path)
            if isinstance(stop, BrokenPipeError):
                raise
            print(f"\nstopped after step {trainer.step}; --resume goes on from {path}", file=sys.stderr)
        return INTERRUPTED

    print(f"checkpoint: {path}\nsample:")
    stream = generate(model, forward, SAMPLE_PROMPT.encode(), temperature=0.8, top_p=0.95, seed=config.seed)
    decode_speed = _show(SAMPLE_PROMPT, islice(stream, args.sample), TextStream())

    differences = decode_differences(model, forward, corpus.validation[:CHECKED_TOKENS])
    beyond = int((~(differences <= DECODE_TOLERANCE)).sum())  # NaN is beyond it too
    equal = beyond <= NEAR_TIES * len(differences)
    print(
        f"decode {'equals' if equal else 'DIFFERS FROM'} full forward: largest difference {differences.max():.1e}, "
        f"{beyond} of {len(differences)} bytes beyond {DECODE_TOLERANCE:.0e}"
    )
    print(
        f"validation {trainer.start_bits:.2f} -> {end_bits:.2f} bits/byte | training {_rate(speed)} | "
        f"decode {_rate(decode_speed)} | {describe_device(trainer.device)}"
    )
    return 0 if equal else 1


def _new_run(args: argparse.Namespace, path: Path) -> tuple[Trainer, Corpus]:
    config = TrainConfig(**_given(args, TrainConfig))
    corpus = Corpus.load(config.text)
    corpus.batch(0, config.seed, config.batch, config.length)  # the text holds a window
    trainer = Trainer(LMConfig(**_given(args, LMConfig)), config, pick_device(args.device))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):  # a checkpoint can be written there
        pass
    return trainer, corpus


def _keep_previous(path: Path) -> None:
    """Moves the checkpoint of an earlier run out of the way, if there is one."""
    if path.exists():
        kept = path.with_name(f"previous-{path.name}")
        instead = ", in place of the one that was kept there" if kept.exists() else ""
        with _refusals():
            path.replace(kept)
        print(f"the checkpoint of an earlier run is kept as {kept}{instead}")


def _resumed_run(args: argparse.Namespace, path: Path) -> tuple[Trainer, Corpus]:
    checkpoint = Checkpoint.load(path)
    changed = {name: value for name, value in _given(args, TrainConfig).items() if name in ("steps", "text")}
    for config in (checkpoint.training, checkpoint.model):
        for name, value in _given(args, type(config)).items():
            if name not in changed and value != getattr(config, name):
                has, instead = getattr(config, name), "leave that option out, or begin anew without --resume"
                raise ValueError(f"the checkpoint has {name} = {has}, which cannot become {value}: {instead}")
    config = replace(checkpoint.training, **changed)
    if config.steps < checkpoint.step:
        raise ValueError(f"the checkpoint is at step {checkpoint.step}: --steps must not be less, got {config.steps}")
    try:
        corpus = Corpus.load(config.text)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"{error}; if the run's text has moved, say with --text where it is now") from error
    if corpus.digest != checkpoint.digest:
        text = ", ".join(config.text) or "the built-in one"
        raise ValueError(
            f"the text ({text}) is not the one that the run began with: give its files, unchanged and in the same order"
        )
    trainer = Trainer(checkpoint.model, config, pick_device(args.device))
    trainer.load_tensors(checkpoint.tensors)
    trainer.step, trainer.start_bits = checkpoint.step, checkpoint.start_bits
    return trainer, corpus


def _given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The settings of a configuration that stand on the command line."""
    given = {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}
    if "text" in given:
        given["text"] = tuple(str(Path(file).resolve()) for file in given["text"])
    return given


def _checkpoint(trainer: Trainer, corpus: Corpus) -> Checkpoint:
    for name, parameter in trainer.model.named_parameters():
        if not parameter.isfinite().all():  # before anything is saved over an earlier checkpoint
            raise SystemExit(f"error: the run diverged: {name} is not finite at step {trainer.step}; try a lower --lr")
    return Checkpoint(
        model=trainer.model.config,
        training=trainer.config,
        step=trainer.step,
        start_bits=trainer.start_bits,
        digest=corpus.digest,
        tensors=trainer.tensors(),
    )


def _learn(trainer: Trainer, corpus: Corpus, forward: Forward, path: Path, save_every: int) -> float | None:
    """Trains to the last step, with a checkpoint now and then on the way; returns tokens per second."""
    config = trainer.config
    seconds = []
    shown = dict(total=config.steps, initial=trainer.step, desc="training", unit="step")
    with tqdm(**shown, disable=sys.stderr is None) as bar:
        if forward is not trainer.model:
            bar.set_postfix_str("the first step compiles")
        while trainer.step < config.steps:
            began = time.perf_counter()
            loss = trainer.train_step(forward, corpus).item()
            seconds.append(time.perf_counter() - began)
            if not math.isfinite(loss):
                raise SystemExit(f"error: the loss is {loss} at step {trainer.step}; try a lower --lr")
            bar.set_postfix_str(f"{loss / math.log(2):.2f} bits/byte", refresh=False)
            bar.update()
            if trainer.step % save_every == 0:
                _checkpoint(trainer, corpus).save(path)
    return _per_second(seconds, config.batch * config.length)


def _generate(args: argparse.Namespace) -> int:
    with _refusals():
        model = load_language_model(args.checkpoint, pick_device(args.device))
        prompt = args.prompt.encode(errors="surrogateescape")
        forward = _forward(model, args.compile)
        stream = generate(model, forward, prompt, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
        _show(args.prompt, islice(stream, args.max_tokens), TextStream(args.stop))
    return 0


def _show(prompt: str, tokens: Iterable[int], text: TextStream) -> float | None:
    """Prints a prompt and what follows it, as it is made; returns tokens per second, apart from the first two."""
    print(prompt, end="", flush=True)
    seconds = []
    began = time.perf_counter()
    for token in tokens:
        seconds.append(time.perf_counter() - began)
        print(text.feed(token), end="", flush=True)
        if text.stopped:
            break
        began = time.perf_counter()
    print(text.feed(None))
    return _per_second(seconds, 1)


def _per_second(seconds: list[float], amount: int) -> float | None:
    """Mean rate of equal pieces of work, apart from the first two, which compile and capture; None without others."""
    return amount * (len(seconds) - 2) / sum(seconds[2:]) if len(seconds) > 2 else None


def _rate(per_second: float | None) -> str:
    return "too short to time" if per_second is None else f"{per_second:,.0f} tokens/s"


def _doctor(args: argparse.Namespace) -> int:
    with _refusals():
        device = pick_device(args.device)
    return examine(device)
