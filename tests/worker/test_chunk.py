"""A message of many ids is one for Celery and many for everybody else."""

from worker.chunk import Chunk
from worker.delivery import CeleryCallbacks, Ending


class World:
    def __init__(self, *ids: str) -> None:
        self.celery: list[str] = []
        self.terminated: list[str] = []
        callbacks = CeleryCallbacks(
            accept=lambda pid, at: self.celery.append("accept"),
            end=lambda result: self.celery.append(f"end {result[0]}"),
            time_out=lambda soft, limit_s: self.celery.append("time_out"),
        )
        self.chunk = Chunk(
            ids,
            callbacks,
            in_hub=lambda call: call(),
            on_terminate=lambda delivery: self.terminated.append(delivery.job_id),
            soft_limit_s=1.0,
            hard_limit_s=2.0,
        )
        self.deliveries = self.chunk.deliveries


def test_it_is_acknowledged_when_each_job_is_decided_and_ends_with_the_last():
    world = World("a", "b", "c")
    assert [each.job_id for each in world.deliveries] == ["a", "b", "c"]
    a, b, c = world.deliveries
    c.accept()
    a.end(Ending.DROPPED)  # somebody else's: never accepted
    assert world.celery == []
    b.accept()
    assert world.celery == ["accept"]
    c.end(Ending.FAILED, "no")
    c.end(Ending.SUCCEEDED)
    assert world.celery == ["accept"]
    b.end(Ending.HANDED_BACK)
    assert world.celery == ["accept", "end False"]


def test_a_chunk_of_jobs_that_are_all_others_is_acknowledged_and_ended():
    world = World("a", "b")
    for delivery in world.deliveries:
        delivery.end(Ending.DROPPED)
    assert world.celery == ["accept", "end False"]


def test_a_hard_time_limit_ends_one_job_and_not_the_chunk():
    world = World("a", "b")
    a, b = world.deliveries
    a.accept()
    b.accept()
    a.time_out(soft=True)
    a.time_out(soft=False)
    a.end(Ending.FAILED)
    assert world.celery == ["accept"]
    b.end(Ending.SUCCEEDED)
    assert world.celery == ["accept", "end False"]


def test_terminate_is_for_every_job():
    world = World("a", "b")
    world.chunk.terminate()
    assert world.terminated == ["a", "b"]
