"""Sources and stages of the pipelines in this folder: plain functions.

A function gets a list of items and returns a list; with dt.each it gets one item.
"""

import hashlib
import random
import re
import time
import unicodedata
from collections import Counter

import dovetail as dt

TEXT = "the quick brown fox jumps over a lazy dog while seven grey whales sing in an old blue harbour"
WORDS = TEXT.split()


# --- sources: iterables


def documents(count=1000, words=200, seed=0):
    """Documents of about `words` words, with tags, entities and odd spaces, like text from the web."""
    dice = random.Random(seed)  # noqa: S311 - no secret
    lengths = [max(1, round(dice.gauss(words, words / 4))) for _ in range(100)]
    texts = [" ".join(dice.choices(WORDS, k=length)) for length in lengths]
    for number in range(count):
        text = texts[number % len(texts)]
        yield {"id": number, "text": f"  <p>{text} {number}</p>\u00a0\u200b &amp; {text[:40].upper()}!!!\r\n"}


def numbers(count=1000):
    yield from range(count)


# --- cleaning


@dt.each
def normalise(doc):
    text = unicodedata.normalize("NFKC", doc["text"]).replace("\u200b", "")
    return {**doc, "text": re.sub(r"\s+", " ", re.sub(r"<[^>]+>|&\w+;", " ", text)).strip()}


@dt.each
def keep_long(doc, least=120):
    """None drops a document."""
    return doc if len(doc["text"].split()) >= least else None


@dt.each
def count_words(doc):
    words = Counter(re.findall(r"\w+", doc["text"].lower()))
    return {"id": doc["id"], "words": len(words), "commonest": words.most_common(3)}


# --- chunks


@dt.each
def chunk(doc, size=200):
    """A generator: one document in, several chunks out."""
    text = doc["text"]
    for number, start in enumerate(range(0, len(text), size)):
        yield {"id": doc["id"], "chunk": number, "text": text[start : start + size]}


def embed(chunks, rounds=60):
    """A batch in, a batch out; the hashes stand for a model's vectors."""
    made = []
    for item in chunks:
        vector = item["text"].encode()
        for _ in range(rounds):
            vector = hashlib.sha256(vector).digest() * 8
        made.append({**item, "vector": vector[:8].hex()})
    return made


# --- heavy and light


@dt.each
def stretch(number, rounds=6000):
    """Some milliseconds of CPU."""
    return number, hashlib.pbkdf2_hmac("sha256", str(number).encode(), b"salt", rounds).hex()


@dt.each
def label(pair):
    number, digest = pair
    return f"{number}:{digest[:16]}"


# --- waiting


@dt.each
def fetch(number, wait_s=0.02):
    """Waits, as for an answer from the network."""
    time.sleep(wait_s)
    return {"id": number, "body": f"page {number} " * 50}


@dt.each
def measure(page):
    return {"id": page["id"], "words": len(page["body"].split())}


# --- a class with a slow setup, and two branches


class Score:
    """One object per worker: `setup` runs once, before its first batch."""

    def setup(self):
        time.sleep(0.5)  # as a model that is loaded
        self.weights = {word: len(word) for word in WORDS}

    def __call__(self, docs):
        weights = self.weights
        return [
            {"id": doc["id"], "score": sum(weights.get(word, 1) for word in doc["text"].split() for _ in range(12))}
            for doc in docs
        ]


@dt.each
def fingerprint(doc, rounds=60):
    return {"id": doc["id"], "print": hashlib.pbkdf2_hmac("sha256", doc["text"].encode(), b"", rounds).hex()}
