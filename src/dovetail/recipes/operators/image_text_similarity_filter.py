"""Filter rows by the CLIP similarity of their images and text."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from dovetail.errors import ConfigError, Problem
from dovetail.recipes.operators.base import STATS_FIELD, BadField, Row
from dovetail.recipes.operators.support.images import ImageFilter, ImageSource, load_rgb
from dovetail.recipes.operators.support.parameter_checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from PIL import Image

    from dovetail.engines.worker_context import Worker

STAT_NAME = "image_text_similarity"
IMAGE_TOKEN, END_OF_CHUNK_TOKEN = "<__dj__image>", "<|__dj__eoc|>"
_SPECIAL_TOKENS = (IMAGE_TOKEN, "<__dj__audio>", "<__dj__video>", END_OF_CHUNK_TOKEN)
MAX_IMAGES_PER_PASS = 64
"""Images per forward pass, so that rows with many images do not determine the memory."""
DOWNLOADS_VARIABLE = "DOVETAIL_ALLOW_DOWNLOADS"
"""Environment variable; 1: download models from the Hugging Face hub. Otherwise they must be on this machine."""


class Chunk(NamedTuple):
    """A chunk of a row's text with the images that it mentions."""

    row: int
    text: str
    images: list[ImageSource]


class ImageTextSimilarityFilter(ImageFilter):
    """Score each chunk of a text (up to `<|__dj__eoc|>`) with the images that it mentions (`<__dj__image>`): the cosine
    similarity times the model's scale, divided by 100. A row without such chunks is kept.

    `hf_clip` is a folder or the name of a model on the Hugging Face hub, which is downloaded only if
    DOVETAIL_ALLOW_DOWNLOADS is 1. All images of a batch of rows are scored together. If one of them cannot be scored,
    the batch fails and no row is changed; the engine then retries with smaller batches.
    """

    extra = "models"
    needs = ("torch", "transformers", "PIL")
    batch_size = 16

    def __init__(
        self,
        hf_clip: str = "openai/clip-vit-base-patch32",
        trust_remote_code: bool = False,
        min_score: float = 0.1,
        max_score: float = 1.0,
        horizontal_flip: bool = False,
        vertical_flip: bool = False,
        any_or_all: str = "any",
        reduce_mode: str = "avg",
    ) -> None:
        super().__init__(any_or_all)
        if not hf_clip:
            raise ValueError("hf_clip is empty; give a folder or a name such as openai/clip-vit-base-patch32")
        self.hf_clip = hf_clip
        self.trust_remote_code = trust_remote_code
        self.min_score = min_score
        self.max_score = max_score
        self.horizontal_flip = horizontal_flip
        self.vertical_flip = vertical_flip
        self.reduce_mode = check_choice("reduce_mode", reduce_mode, ("avg", "max", "min"))
        self._model: Any = None
        self._processor: Any = None

    def __getstate__(self) -> dict[str, object]:
        """Pickled without the model, which each worker loads."""
        return {**self.__dict__, "_model": None, "_processor": None}

    def columns(self) -> tuple[str, ...]:
        return (self.text_key, self.image_key)

    def setup(self, worker: Worker) -> None:
        import torch

        on_gpu = bool(worker.gpus) and torch.cuda.is_available()
        if not on_gpu:
            torch.set_num_threads(max(1, int(worker.cpus)))
        self._load(f"cuda:{worker.gpus[0]}" if on_gpu else "cpu")

    def _load(self, device: str) -> None:
        transformers: Any = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        how = {
            "local_files_only": os.environ.get(DOWNLOADS_VARIABLE) != "1",
            "trust_remote_code": self.trust_remote_code,
        }
        try:
            processor: Any = transformers.AutoProcessor.from_pretrained(self.hf_clip, **how)
            model: Any = transformers.AutoModel.from_pretrained(self.hf_clip, **how)
        except (OSError, ValueError) as error:
            raise ConfigError(self._missing(error)) from error
        if not hasattr(model, "logit_scale"):
            message = f"hf_clip {self.hf_clip!r} is a {type(model).__name__}, not a CLIP model"
            raise ConfigError(Problem("DT421", message, fixes=("hf_clip: openai/clip-vit-base-patch32",)))
        self._processor = processor
        self._model = model.float().eval().to(device)

    def _missing(self, error: Exception) -> Problem:
        lines = str(error).splitlines() or [type(error).__name__]
        if os.path.isdir(self.hf_clip):  # noqa: PTH112 - as it was written
            message = f"the folder {self.hf_clip} contains no model that can be loaded"
        else:
            message = f"hf_clip {self.hf_clip!r} is neither a folder nor a model downloaded to this machine"
        fixes = (
            f"hf download {self.hf_clip}",
            "hf_clip: /path/to/a/folder/with/the/model",
            f"{DOWNLOADS_VARIABLE}=1 in the environment of the run, so that each machine downloads it",
        )
        return Problem("DT421", message, (lines[0],), fixes)

    @overload
    def __call__(self, row: Row) -> Row | None: ...
    @overload
    def __call__(self, row: list[Row]) -> list[Row]: ...
    def __call__(self, row: Row | list[Row]) -> Row | list[Row] | None:
        """The rows of a list that are kept."""
        rows = row if isinstance(row, list) else [row]
        found = self.similarities(rows)
        kept = []
        for one, similarities in zip(rows, found, strict=True):
            stats = one.setdefault(STATS_FIELD, {})
            stats[STAT_NAME] = similarities
            if self.keeps(one, stats):
                kept.append(one)
        return kept if isinstance(row, list) else next(iter(kept), None)

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if STAT_NAME not in stats:
            stats[STAT_NAME] = self.similarities([row])[0]

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        return self.keeps_by_images(
            [self.in_range(score, self.min_score, self.max_score) for score in stats[STAT_NAME]]
        )

    def similarities(self, rows: Sequence[Row]) -> list[list[float]]:
        """Scores of the chunks of each row; known scores are not computed again."""
        known = [(row.get(STATS_FIELD) or {}).get(STAT_NAME) for row in rows]
        found: list[list[float]] = [[] if similarities is None else similarities for similarities in known]
        chunks = [
            chunk
            for number, row in enumerate(rows)
            if known[number] is None
            for chunk in chunks_of(number, self.text_of(row), self.images_of(row))
        ]
        for some in _model_passes(chunks):
            for chunk, score in zip(some, self._scores(some), strict=True):
                found[chunk.row].append(score)
        return found

    def _scores(self, chunks: Sequence[Chunk]) -> list[float]:
        import torch

        if self._model is None:
            self._load("cpu")
        images = [self._turned(load_rgb(source)) for chunk in chunks for source in chunk.images]
        inputs = self._processor(
            text=[chunk.text for chunk in chunks],
            images=images,
            return_tensors="pt",
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            padding=True,
        ).to(self._model.device)
        with torch.inference_mode():
            logits = (self._model(**inputs).logits_per_text / 100.0).cpu()
        reduce: Any = {"avg": torch.mean, "max": torch.max, "min": torch.min}[self.reduce_mode]
        scores, start = [], 0
        for number, chunk in enumerate(chunks):
            end = start + len(chunk.images)
            scores.append(float(reduce(logits[number, start:end])))
            start = end
        return scores

    def _turned(self, image: Image.Image) -> Image.Image:
        from PIL import ImageOps

        if self.horizontal_flip:
            image = ImageOps.mirror(image)
        return ImageOps.flip(image) if self.vertical_flip else image


def chunks_of(row: int, text: str, images: Sequence[ImageSource]) -> Iterator[Chunk]:
    """The chunks of a text that mention images, with these images; none if the row has no images."""
    if not images:
        return
    start = 0
    for piece in text.split(END_OF_CHUNK_TOKEN):
        end = start + piece.count(IMAGE_TOKEN)
        if end > len(images):
            raise BadField(f"the text mentions {text.count(IMAGE_TOKEN)} images, and the row has {len(images)}")
        if end > start:
            yield Chunk(row, strip_special_tokens(piece), list(images[start:end]))
        start = end


def strip_special_tokens(text: str) -> str:
    for token in _SPECIAL_TOKENS:
        text = text.replace(token, "").strip()
    return text


def _model_passes(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks whose images go through the model together."""
    some: list[Chunk] = []
    images = 0
    for chunk in chunks:
        if some and images + len(chunk.images) > MAX_IMAGES_PER_PASS:
            yield some
            some, images = [], 0
        some.append(chunk)
        images += len(chunk.images)
    if some:
        yield some
