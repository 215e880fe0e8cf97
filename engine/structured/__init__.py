"""Structured output: a form that a client asks for becomes a mask over the next token's ids.

gbnf       GBNF, before it is translated
grammar    a form in the words of llguidance, and where a sequence stands in it
trial      the process in which a form is tried first, under limits; trial_process asks it
compiler   from a form to its grammar, beside the engine's steps; keeps what it made
pacing     how often a row with an expensive grammar may take part in a step

No torch in here: masks are bytes until they reach the sampler.
"""
