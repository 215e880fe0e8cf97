"""Drafts: tokens guessed to come next, several of which one step can confirm.

A proposer guesses, the gate says whether guessing pays, the scheduler gives what room it has left,
and `engine.draws` tells which guesses were right. None of them changes what is generated.
Sources: Leviathan et al. 2023 and Chen et al. 2023 (speculative decoding).
"""
