"""What an engine has done since it was built, and how it stands."""

from bisect import bisect_left
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.outputs import STEP_BOUNDS_S, EngineStats
from engine.scheduler import Scheduler
from engine.step_plan import StepPlan


@dataclass(slots=True)
class Totals:
    """Counted by the engine as it goes; EngineStats explains each."""

    num_steps: int = 0
    last_step_seqs: int = 0
    last_step_tokens: int = 0
    peak_step_seqs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    scheduled_tokens: int = 0
    scheduled_seqs: int = 0
    drawing_seqs: int = 0
    draft_tokens: int = 0
    confirmed_tokens: int = 0
    peak_used_blocks: int = 0
    steps_by_time: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    step_s: float = 0.0
    run_s: float = 0.0

    def count(self, plan: StepPlan, num_used_blocks: int) -> None:
        """Take in a step that is about to run."""
        self.num_steps += 1
        self.last_step_seqs = len(plan.scheduled)
        self.last_step_tokens = plan.num_tokens
        self.peak_step_seqs = max(self.peak_step_seqs, self.last_step_seqs)
        self.scheduled_seqs += self.last_step_seqs
        self.scheduled_tokens += self.last_step_tokens
        self.drawing_seqs += sum(row.samples for row in plan.scheduled)
        self.draft_tokens += plan.num_drafts
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)

    def took(self, step_s: float, *, num_steps: int) -> None:
        """Take in how long a call of step() took that began `num_steps` steps, one or none."""
        self.step_s += step_s
        self.steps_by_time[bisect_left(STEP_BOUNDS_S, step_s)] += num_steps

    def stats(self, scheduler: Scheduler, config: EngineConfig, num_outside: int) -> EngineStats:
        """These totals, and how things stand; `num_outside` requests wait outside the scheduler."""
        assert config.max_num_batched_tokens is not None, "the engine has chosen"
        free_tokens = scheduler.num_free_blocks * config.block_size
        num_seqs = scheduler.num_running + scheduler.num_waiting
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_outside,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            free_seqs=max(0, config.max_num_seqs - num_seqs),
            free_tokens=max(0, free_tokens - scheduler.promised_tokens),
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_preemptions=scheduler.num_preemptions,
            last_step_seqs=self.last_step_seqs,
            last_step_tokens=self.last_step_tokens,
            peak_step_seqs=self.peak_step_seqs,
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            scheduled_tokens=self.scheduled_tokens,
            scheduled_seqs=self.scheduled_seqs,
            drawing_seqs=self.drawing_seqs,
            draft_tokens=self.draft_tokens,
            confirmed_tokens=self.confirmed_tokens,
            peak_used_blocks=self.peak_used_blocks,
            step_bounds_s=STEP_BOUNDS_S,
            steps_by_time=tuple(self.steps_by_time),
            step_s=self.step_s,
            run_s=self.run_s,
        )
