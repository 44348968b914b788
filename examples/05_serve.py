"""Serve a pipeline: futures, a request that fails alone, ordered results, asyncio, and a drain.

python examples/05_serve.py
"""

import asyncio
import time

import dovetail as dt


def clean(text):
    text = text.strip().lower()
    return text or None  # None drops the item; the result of the request is None


class Model:
    """Created once per worker. It gets the items of several requests as a list, and returns one result for each."""

    def setup(self):
        self.words = {"good": 1, "fine": 1, "bad": -1}

    def __call__(self, texts):
        time.sleep(0.005)  # a batch takes about as long as a single item
        return [self.score(text) for text in texts]

    def score(self, text):
        if "?" in text:
            raise ValueError(f"{text!r} is a question")
        return sum(self.words.get(word, 0) for word in text.split())


pipe = dt.Pipeline([dt.Stage("clean", dt.each(clean)), dt.Stage("model", Model, batch_size=16)], name="mood")

with dt.serve(pipe, cluster="1x(2cpu, 2GB)", max_wait="10ms") as service:
    print("--- single requests")
    ticket = service.submit("  A GOOD day ")  # a concurrent.futures.Future
    print(ticket.result(timeout=30))
    print(service.submit("   ").result(timeout=30))

    print("\n--- a request that fails, among others")
    tickets = [service.submit(text) for text in ("good", "is it bad?", "bad")]
    for ticket in tickets:
        error = ticket.exception(timeout=30)
        print(ticket.result() if error is None else f"{error.stage}: {error.error}")

    print("\n--- many requests, results in order")
    began = time.perf_counter()
    moods = list(service.map(f"{'good ' * (number % 4)} day" for number in range(2000)))
    print(moods[:8], f"{len(moods)} results")
    print(f"in batches: {2000 * 0.005 / 2 / (time.perf_counter() - began):.0f} times as fast as one by one")

    print("\n--- from asyncio")

    async def ask_three():
        return await asyncio.gather(*[service.ask(text) for text in ("fine", "bad bad", "good fine")])

    print(asyncio.run(ask_three()))
    last = service.submit("good good")
# leaving the block drains the service: pending requests are answered, then the workers stop

print("\n--- after the drain")
print(last.result(timeout=0))
try:
    service.submit("too late")
except dt.RunError as error:
    print(error)
