"""`image_text_similarity_filter`: scores of CLIP, and failures of single rows.

The model is tiny, with random weights, and made here: no test may download one.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dovetail.engines.worker_context import Worker
from dovetail.errors import ConfigError
from dovetail.recipes.operators.base import STATS_FIELD, BadField
from dovetail.recipes.operators.image_text_similarity_filter import (
    END_OF_CHUNK_TOKEN,
    IMAGE_TOKEN,
    MAX_IMAGES_PER_PASS,
    STAT_NAME,
    ImageTextSimilarityFilter,
    chunks_of,
    strip_special_tokens,
)

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}: pip install 'dovetail-ml[models]'"),
    pytest.mark.xdist_group("models"),  # one process imports the libraries and loads the model
]

COLOURS = ((250, 10, 10), (10, 250, 10), (10, 10, 250), (250, 250, 0), (0, 0, 0), (255, 255, 255))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a CLIP of 2 layers that reads small letters."""
    import torch

    library: Any = import_module("transformers")
    in_pillow: Any = import_module("transformers.models.clip.image_processing_pil_clip")
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = library.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    ends = {"bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    text = {**layers, **ends, "vocab_size": len(tokens), "max_position_embeddings": 24}
    vision = {**layers, "image_size": 16, "patch_size": 8}
    torch.manual_seed(3)
    config = library.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8, initializer_factor=8.0)
    library.CLIPModel(config).save_pretrained(folder)
    side = {"height": 16, "width": 16}
    images = in_pillow.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    library.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Pictures with one colour on the left and another at the top right."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for number, colour in enumerate(COLOURS):
        image = Image.new("RGB", (24, 20), colour)
        image.paste(COLOURS[(number + 2) % len(COLOURS)], (12, 0, 24, 7))
        image.save(folder / f"{number}.png")
        paths.append(str(folder / f"{number}.png"))
    return paths


@cache
def loaded(folder: str) -> tuple[Any, Any]:
    library: Any = import_module("transformers")
    return library.AutoModel.from_pretrained(folder).eval(), library.AutoProcessor.from_pretrained(folder)


def scored_alone(folder: str, text: str, images: list[Any]) -> list[float]:
    """One text with its images, as Data-Juicer asks the model."""
    import torch

    model, processor = loaded(folder)
    inputs = processor(text=text, images=images, return_tensors="pt", truncation=True, max_length=24, padding=True)
    with torch.no_grad():
        return [float(score) for score in (model(**inputs).logits_per_text / 100)[0]]


def picture(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def row_of(text: str, images: list[Any]) -> dict[str, Any]:
    return {"text": text, "images": images}


def test_rows_of_a_batch_get_the_scores_of_single_rows(clip: str, pictures: list[str]) -> None:
    texts = ["a red cat", "dog", "the sky is blue and far away", "x"]
    rows = [row_of(f"{IMAGE_TOKEN} {text}", [path]) for text, path in zip(texts, pictures, strict=False)]
    ImageTextSimilarityFilter(clip, min_score=-1.0)(rows)
    for row, text, path in zip(rows, texts, pictures, strict=False):
        assert row[STATS_FIELD][STAT_NAME] == pytest.approx(scored_alone(clip, text, [picture(path)]), abs=1e-5)
    assert len({round(row[STATS_FIELD][STAT_NAME][0], 4) for row in rows}) > 1


@pytest.mark.parametrize(("mode", "reduce"), [("avg", lambda s: sum(s) / len(s)), ("max", max), ("min", min)])
def test_each_chunk_of_a_text_has_its_own_images(clip: str, pictures: list[str], mode: str, reduce: Any) -> None:
    text = (
        f"{IMAGE_TOKEN}a cat {END_OF_CHUNK_TOKEN} no image here {END_OF_CHUNK_TOKEN} {IMAGE_TOKEN} "
        f"two {IMAGE_TOKEN} dogs {END_OF_CHUNK_TOKEN}"
    )
    rows = [row_of(text, pictures[:3])]
    ImageTextSimilarityFilter(clip, min_score=-1.0, reduce_mode=mode)(rows)
    # the token in the middle leaves two spaces, as in Data-Juicer
    first = scored_alone(clip, "a cat", [picture(pictures[0])])
    second = scored_alone(clip, "two  dogs", [picture(pictures[1]), picture(pictures[2])])
    assert rows[0][STATS_FIELD][STAT_NAME] == pytest.approx([reduce(first), reduce(second)], abs=1e-5)


def test_flipped_images_are_scored_flipped(clip: str, pictures: list[str]) -> None:
    from PIL import ImageOps

    original = picture(pictures[0])
    wanted = {
        (True, False): ImageOps.mirror(original),
        (False, True): ImageOps.flip(original),
        (True, True): ImageOps.flip(ImageOps.mirror(original)),
    }
    plain = scored_alone(clip, "cat", [original])
    for (horizontal, vertical), image in wanted.items():
        operator = ImageTextSimilarityFilter(clip, horizontal_flip=horizontal, vertical_flip=vertical)
        found = operator.similarities([row_of(f"{IMAGE_TOKEN} cat", [pictures[0]])])[0]
        assert found == pytest.approx(scored_alone(clip, "cat", [image]), abs=1e-5)
        assert found != pytest.approx(plain, abs=1e-6)


def test_rows_out_of_range_are_dropped_by_any_or_by_all(clip: str, pictures: list[str]) -> None:
    text = f"{IMAGE_TOKEN} cat {END_OF_CHUNK_TOKEN} {IMAGE_TOKEN} zebra"
    scores = ImageTextSimilarityFilter(clip).similarities([row_of(text, pictures[:2])])[0]
    middle = sum(scores) / 2
    assert min(scores) < middle < max(scores)
    for any_or_all, kept in (("any", 1), ("all", 0)):
        operator = ImageTextSimilarityFilter(clip, min_score=middle, any_or_all=any_or_all)
        assert len(operator([row_of(text, pictures[:2])])) == kept
    operator = ImageTextSimilarityFilter(clip, min_score=middle, any_or_all="all")
    operator.reversed_range = True
    kept_outside = operator([row_of(f"{IMAGE_TOKEN} cat", pictures[:1])])
    assert bool(kept_outside) is (scores[0] < middle)


def test_rows_without_images_or_places_are_kept(clip: str, pictures: list[str]) -> None:
    rows = [
        row_of("no images", []),
        row_of("none given", None),  # type: ignore[arg-type]
        {"text": "no field"},
        row_of("no place", pictures[:1]),
        row_of("", pictures[:1]),
    ]
    assert ImageTextSimilarityFilter(clip, min_score=0.99)(rows) == rows
    assert [row[STATS_FIELD][STAT_NAME] for row in rows] == [[], [], [], [], []]


def test_a_single_row_is_accepted_like_a_list(clip: str, pictures: list[str]) -> None:
    row = row_of(f"{IMAGE_TOKEN} cat", pictures[:1])
    assert ImageTextSimilarityFilter(clip, min_score=-1.0)(row) is row
    assert ImageTextSimilarityFilter(clip, min_score=0.999)(row) is None


def test_known_scores_are_not_computed_again(clip: str) -> None:
    row = {**row_of(f"{IMAGE_TOKEN} cat", ["/nowhere.png"]), STATS_FIELD: {STAT_NAME: [0.5]}}
    assert ImageTextSimilarityFilter(clip)([row]) == [row]
    assert row[STATS_FIELD] == {STAT_NAME: [0.5]}


def test_long_unusual_and_right_to_left_texts_are_scored(clip: str, pictures: list[str]) -> None:
    texts = ["cat " * 250_000, "\U0001f600 \U0001f468‍\U0001f469", "שלום עולם", ""]
    rows = [row_of(IMAGE_TOKEN + text, pictures[:1]) for text in texts]
    ImageTextSimilarityFilter(clip, min_score=-1.0)(rows)
    assert all(len(row[STATS_FIELD][STAT_NAME]) == 1 for row in rows)


def test_bytes_are_scored_like_the_file(clip: str, pictures: list[str]) -> None:
    operator = ImageTextSimilarityFilter(clip)
    content = Path(pictures[1]).read_bytes()
    rows = [
        row_of(f"{IMAGE_TOKEN} cat", [pictures[1]]),
        row_of(f"{IMAGE_TOKEN} cat", [content]),
        {"text": f"{IMAGE_TOKEN} cat", "images": ["gone.png"], "image_bytes": [content]},
    ]
    first, second, third = operator.similarities(rows)
    assert second == pytest.approx(first)
    assert third == pytest.approx(first)


def test_a_batch_with_a_broken_row_fails_as_a_whole_and_changes_no_row(clip: str, pictures: list[str]) -> None:
    rows = [row_of(f"{IMAGE_TOKEN} cat", [path]) for path in [*pictures[:3], "/nowhere/at/all.png"]]
    with pytest.raises(BadField, match=r"'/nowhere/at/all\.png'"):
        ImageTextSimilarityFilter(clip)(rows)
    assert not any(STATS_FIELD in row for row in rows)
    assert len(ImageTextSimilarityFilter(clip, min_score=-1.0)(rows[:3])) == 3


@pytest.mark.parametrize("row", [{"images": []}, {"text": None, "images": []}, {"text": 7, "images": []}])
def test_a_missing_or_wrong_text_is_reported(clip: str, row: dict[str, Any]) -> None:
    with pytest.raises(BadField, match="'text'"):
        ImageTextSimilarityFilter(clip)([row])


def test_more_image_tokens_than_images_are_reported(pictures: list[str]) -> None:
    with pytest.raises(BadField, match="mentions 3 images, and the row has 2"):
        list(chunks_of(0, f"{IMAGE_TOKEN}{IMAGE_TOKEN}{END_OF_CHUNK_TOKEN}{IMAGE_TOKEN}", pictures[:2]))


def test_more_images_than_one_pass_takes_are_scored_alike(clip: str, pictures: list[str]) -> None:
    count = MAX_IMAGES_PER_PASS // 6 + 3
    rows = [row_of(IMAGE_TOKEN * 6 + "cat", pictures) for _ in range(count)]
    found = ImageTextSimilarityFilter(clip).similarities(rows)
    alone = scored_alone(clip, "cat", [picture(path) for path in pictures])
    assert found == [pytest.approx([sum(alone) / 6], abs=1e-5)] * count


def test_special_tokens_are_removed_from_texts() -> None:
    assert strip_special_tokens(f" {IMAGE_TOKEN} a <__dj__audio>cat<__dj__video> {END_OF_CHUNK_TOKEN}") == "a cat"


def test_invalid_parameters_are_refused() -> None:
    for wrong in ({"any_or_all": "some"}, {"reduce_mode": "sum"}, {"hf_clip": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ImageTextSimilarityFilter(**wrong)  # type: ignore[arg-type]


def test_planning_does_not_load_a_model() -> None:
    script = (
        "import sys; from dovetail.recipes.operators.image_text_similarity_filter import *;"
        "ImageTextSimilarityFilter('no-user/no-model').columns();"
        "assert not {'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_worker_without_a_gpu_loads_the_model_on_the_cpu_and_models_are_not_pickled(
    clip: str, pictures: list[str]
) -> None:
    import torch

    threads = torch.get_num_threads()
    operator = ImageTextSimilarityFilter(clip, min_score=-1.0)
    try:
        operator.setup(Worker(0, "clip", cpus=1.0))
        assert str(operator._model.device) == "cpu"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert len(pickle.dumps(operator)) < 1000
    again = pickle.loads(pickle.dumps(operator))
    assert len(again([row_of(f"{IMAGE_TOKEN} cat", pictures[:1])])) == 1


def test_a_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        ImageTextSimilarityFilter(str(tmp_path)).setup(Worker(0, "clip"))
    assert "contains no model that can be loaded" in raised.value.problems[0].message


@pytest.mark.long
def test_a_broken_row_fails_alone_in_a_run(clip: str, pictures: list[str]) -> None:
    import dovetail as dt

    rows = [{"number": number, **row_of(f"{IMAGE_TOKEN} cat", [pictures[number % 6]])} for number in range(40)]
    rows[21]["images"] = ["/nowhere.png"]
    operator = ImageTextSimilarityFilter(clip, min_score=-1.0)
    stage = dt.Stage("clip", operator, batch_size=operator.batch_size, on_error="skip", workers=1)
    run = dt.run(dt.Pipeline([stage], name="clip"), rows)
    assert sorted(row["number"] for row in run) == [number for number in range(40) if number != 21]
    assert ["/nowhere.png" in error.error for error in run.errors] == [True]


def test_a_missing_model_is_one_error_and_nothing_is_downloaded(
    clip: str, pictures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Any = import_module("huggingface_hub")
    requested: list[str] = []

    def refuse(_client: Any, request: Any, *_: Any, **__: Any) -> NoReturn:
        requested.append(str(request.url))
        raise OSError("no network in this test")

    monkeypatch.delenv("DOVETAIL_ALLOW_DOWNLOADS", raising=False)
    monkeypatch.setattr(type(hub.utils.get_session()), "send", refuse)
    operator = ImageTextSimilarityFilter(clip, min_score=-1.0)
    operator.setup(Worker(0, "clip"))
    assert len(operator([row_of(f"{IMAGE_TOKEN} cat", pictures[:1])])) == 1
    with pytest.raises(ConfigError) as raised:
        ImageTextSimilarityFilter("no-user/no-model").setup(Worker(0, "clip"))
    (problem,) = raised.value.problems
    assert "'no-user/no-model' is neither a folder nor a model downloaded" in problem.message
    assert problem.code == "DT421"
    assert problem.fix_texts[0] == "hf download no-user/no-model"
    # the hub's own statistics, which it requests for any use of the library
    assert [url for url in requested if "agent-harnesses" not in url] == []
