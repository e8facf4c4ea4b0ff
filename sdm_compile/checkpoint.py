"""Checkpoints of a training run: one safetensors file that holds everything a resumed run needs.

The file's metadata carries a format version and, as JSON, the model's sizes, the training settings and where the run
stands. It is written beside its final name and then renamed, so a checkpoint is always a whole one.

model = load_language_model("sdm-run")        what a run left in its folder: the model alone
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .lm import LanguageModel, LMConfig
from .training import TrainConfig, load_model

CHECKPOINT = "checkpoint.safetensors"  # its name in a run's folder
FORMAT = "sdm_compile.lm"
VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A training run at rest.

    Args:
        model, training: the run's sizes and settings.
        step: number of optimizer steps done.
        start_bits: validation bits per byte before the first step, None if they were not measured yet.
        digest: of the text that the run learns from.
        tensors: those of Trainer.tensors().
    """

    model: LMConfig
    training: TrainConfig
    step: int
    start_bits: float | None
    digest: str
    tensors: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Writes the file, replacing an older one in a single move."""
        run = {name: getattr(self, name) for name in ("step", "start_bits", "digest")}
        run |= {"model": asdict(self.model), "training": asdict(self.training)}
        metadata = {"format": FORMAT, "format_version": str(VERSION), "run": json.dumps(run)}
        data = save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Checkpoint:
        """Reads a checkpoint, its tensors on the CPU.

        Args:
            path: the file, or the folder of the run.
        Raises:
            FileNotFoundError: there is none.
            ValueError: the file is not a checkpoint, or is of another format version.
        """
        path = Path(path)
        if path.is_dir():
            path = path / CHECKPOINT
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path.absolute()}; a training run leaves one in its folder")
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        with file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is not a language model checkpoint of this package")
            version = metadata.get("format_version")
            if version != str(VERSION):
                raise ValueError(f"{path} has format version {version}; this one reads {VERSION}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        try:
            run = json.loads(metadata["run"])
            model = LMConfig(**run.pop("model"))
            training = run.pop("training")
            training = TrainConfig(**training | {"text": tuple(training["text"])})
            return cls(model=model, training=training, tensors=tensors, **run)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not say what a run needs: {error}") from error


def load_language_model(path: str | Path, device: torch.device | str | None = None) -> LanguageModel:
    """The trained model of a checkpoint, in evaluation mode.

    Args:
        path: the file, or the folder of the run.
        device: where the model is to be; None: the CPU.
    Raises:
        FileNotFoundError, ValueError: see `Checkpoint.load` and `load_model`.
    """
    checkpoint = Checkpoint.load(path)
    with torch.inference_mode(False), torch.device("cpu" if device is None else device):
        model = LanguageModel(checkpoint.model)
        load_model(model, checkpoint.tensors)
    return model.eval()
