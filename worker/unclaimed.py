"""Ids that came in chunks and wait in the worker for room: their rows are nobody's until then.

A row is claimed when the engine is about to have a place for it, so a worker that is killed costs
those an attempt that it ran, or was about to run, and no others: what waits here is queued in SQL.
Its message is acknowledged, for nothing hangs on it: ids that die with a worker are published anew.
"""

from collections.abc import Callable

from worker.book import Book
from worker.delivery import Delivery, Ending
from worker.entries import Entry, PutBack


class Unclaimed:
    """Thread-safe: under the book's lock."""

    def __init__(
        self, book: Book, post: Callable[[Entry], None], claim: Callable[[Delivery], None]
    ) -> None:
        self._book = book
        self._post = post
        self._claim = claim  # posts the claim of a delivery that is in the book

    def add(self, delivery: Delivery) -> None:
        with self._book.lock:
            self._book.unclaimed[delivery] = None
            if self._book.draining:
                self.put_back(delivery)
                return
            self.claim()
            if delivery in self._book.unclaimed:
                delivery.accept()

    def claim(self) -> None:
        """As many as there is room for, the first first."""
        with self._book.lock:
            while self._book.may_claim():
                delivery = next(iter(self._book.unclaimed))
                del self._book.unclaimed[delivery]
                self._claim(delivery)

    def put_back(self, *deliveries: Delivery) -> None:
        """Let others have them at once; those that are claimed already are not changed."""
        with self._book.lock:
            for delivery in deliveries:
                if delivery in self._book.unclaimed:
                    del self._book.unclaimed[delivery]
                    self._post(PutBack(job_id=delivery.job_id, answer=self._ending(delivery)))

    def put_back_all(self) -> None:
        with self._book.lock:
            self.put_back(*list(self._book.unclaimed))

    def _ending(self, delivery: Delivery) -> Callable[[], None]:
        return lambda: self._book.end(delivery, Ending.HANDED_BACK)
