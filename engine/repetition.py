"""Whether a generation is caught in a loop, told token by token."""

from collections import deque

from engine.sampling_params import RepetitionDetection


class LoopDetector:
    """Looks for a pattern of tokens that ends the generation `min_count` times in a row.

    Of each pattern size p it counts for how many tokens the text has equalled itself p tokens
    earlier: a pattern stands there c times exactly when that run is (c - 1) × p long. So a token
    costs max_pattern_size comparisons, however long the generation is.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        self._detection = detection
        self._recent: deque[int] = deque(maxlen=detection.max_pattern_size)  # newest first
        self._runs = [0] * detection.max_pattern_size  # [p - 1]

    def add(self, token_id: int) -> bool:
        """Take in the next token; whether the generation now ends in a loop."""
        runs, times = self._runs, self._detection.min_count - 1
        looped = False
        for index, earlier in enumerate(self._recent):
            runs[index] = runs[index] + 1 if earlier == token_id else 0
            size = index + 1
            if size >= self._detection.min_pattern_size and runs[index] >= times * size:
                looped = True
        self._recent.appendleft(token_id)
        return looped
