"""Diverse beam search written down plainly, in float64: what several groups of beams should find.

Vijayakumar et al. 2016, section 3, with Hamming diversity, in the turns and with the ends that
transformers 4 gave it (`_group_beam_search`, BeamSearchScorer, BeamHypotheses); transformers 5 has
it no more. `cases/group_beams.json` holds what transformers 4 itself found.
"""


class Group:
    """The beams of one group, and its texts that have ended."""

    def __init__(self, params):
        self.params = params
        self.size = params.num_beams // params.num_beam_groups
        self.beams = [((), 0.0)]
        self.ended = []  # (score, text)
        self.done = False

    def add(self, text, log_probability):
        score = log_probability / len(text) ** self.params.length_penalty
        if len(self.ended) < self.size or score > min(self.ended)[0]:
            self.ended.append((score, text))
            if len(self.ended) > self.size:
                self.ended.remove(min(self.ended))

    def ends(self, best, length):
        if len(self.ended) < self.size:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.params.max_tokens
        return min(self.ended)[0] >= best / length**self.params.length_penalty


def diverse_texts(params, stop_ids, log_probabilities):
    """Ids of the texts, best first; `log_probabilities` gives those of each id behind a text."""
    groups = [Group(params) for _ in range(params.num_beam_groups)]
    for length in range(1, params.max_tokens + 1):
        said_before = []
        for group in groups:
            if group.done:
                continue  # says nothing, so costs later groups nothing
            candidates = [
                (logprob - params.diversity_penalty * said_before.count(v) + sum_before, (*text, v))
                for text, sum_before in group.beams
                for v, logprob in enumerate(log_probabilities(text))
            ]
            candidates.sort(reverse=True)
            candidates = candidates[: max(2, 1 + len(stop_ids)) * group.size]
            group.beams = []
            for place, (total, text) in enumerate(candidates):
                if text[-1] not in stop_ids:
                    group.beams.append((text, total))
                elif place < group.size:
                    group.add(text, total)
                if len(group.beams) == group.size:
                    break
            group.done = group.ends(candidates[0][0], length)
            said_before += [text[-1] for text, _ in group.beams]
    for group in groups:
        if not group.done:
            for text, total in group.beams:
                group.add(text, total)
    found = sorted((pair for group in groups for pair in group.ended), reverse=True)
    return [text for _, text in found][: params.n]
