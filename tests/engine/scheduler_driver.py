"""A scheduler under test, turned by hand: tokens come from the test, time from a step counter."""

from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_plan import StepPlan

EOS = 0
LIMITS = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "eos_token_ids": frozenset({EOS}),
}


class Driver:
    def __init__(self, **limits):
        self.scheduler = Scheduler(**(LIMITS | limits))
        self.now = 0.0
        self.num_requests = 0

    def add(self, prompt, *, max_tokens=8, request_id=None, seed=0, n=1, options=None, **request):
        """A request for a prompt (an int: so many tokens like no other's). Returns its samples."""
        self.num_requests += 1
        if isinstance(prompt, int):
            prompt = [1000 * self.num_requests + i for i in range(prompt)]
        params = SamplingParams(max_tokens=max_tokens, n=n, **(options or {}))
        request_id = request_id or f"request {self.num_requests}"
        return self.scheduler.add(request_id, prompt, params, seed=seed, **request)

    def schedule(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        return plan

    def update(self, plan: StepPlan, token_id: int = 7) -> list[Sequence]:
        sampled = [token_id if row.samples else None for row in plan.scheduled]
        changed = self.scheduler.update(plan, sampled, self.now)
        self.scheduler.check()
        return changed

    def step(self, token_id: int = 7) -> dict[Sequence, int]:
        """One step in which every row that samples gets `token_id`; tokens computed by sequence."""
        plan = self.schedule()
        counts = {row.sequence: row.num_scheduled_tokens for row in plan.scheduled}
        self.update(plan, token_id)
        return counts

    def drain(self, max_steps: int = 1000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.unfinished:
                return num_steps
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps")
