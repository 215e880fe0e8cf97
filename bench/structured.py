"""What structured output costs: `python -m bench.structured MODEL_FOLDER`.

Compiles ordinary and hostile forms with llguidance and, where it is installed, with xgrammar, and
makes a mask at each token of a text that has the form. Prints milliseconds. Each case runs in a
process of its own, ended after 20 seconds. With `--distinct N` it compiles so many small schemas
instead, each another one, as an engine does, and prints what their cache holds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import psutil

from engine.structured.compiler import GrammarCompiler
from engine.structured.grammar import Grammar, GrammarError, load_vocabulary, translate
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer

LIMIT_S = 20.0

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_PERSON_TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"]}'
_WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}
# a form of some kind, and a text that has it
CASES: dict[str, tuple[str, str, str]] = {
    "schema": ("json", json.dumps(_PERSON), _PERSON_TEXT),
    "any object": ("json", '{"type":"object"}', _PERSON_TEXT),
    "phone number": ("regex", "[0-9]{3}-[0-9]{4}", "123-4567"),
    "800 optional": ("json", json.dumps(_WIDE), '{"p0": "a", "p799": "b"}'),
    "enum of 5000": ("json", json.dumps({"enum": [f"v{i:05}" for i in range(5000)]}), '"v00001"'),
    "(a|aa)+": ("regex", "(a|aa)+", "aaaaaaa"),
    ".*a.{30}": ("regex", ".*a.{30}", "aaa"),
    "nested counts": ("regex", "(((a{1,50}){1,50}){1,50}){1,50}", "aaa"),
    "not": ("json", '{"not":{"type":"string"}}', "1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint folder")
    parser.add_argument("--case", nargs=2, metavar=("LIBRARY", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--distinct", type=int, metavar="N")
    args = parser.parse_args()
    if args.distinct:
        compile_distinct(args.model, args.distinct)
        return 0
    if args.case:
        print(run_case(args.model, *args.case))
        return 0
    for library in ("llguidance", "xgrammar"):
        if find_spec(library) is None:
            print(f"{library} is not installed")
            continue
        for name in CASES:
            command = [sys.executable, "-m", "bench.structured", args.model, "--case"]
            try:
                done = subprocess.run(
                    [*command, library, name], capture_output=True, text=True, timeout=LIMIT_S
                )
                lines = (done.stdout or done.stderr).strip().splitlines()
                outcome = lines[-1][:120] if lines else f"ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = f"not done after {LIMIT_S:g} s"
            print(f"{library:10} {name:14} {outcome}", flush=True)
    return 0


def compile_distinct(model: str, count: int) -> None:
    tokenizer = Tokenizer.load(model)
    compiler = GrammarCompiler(
        tokenizer.to_json(), tokenizer.vocab_size, frozenset(tokenizer.eos_token_ids)
    )
    process, slowest = psutil.Process(), 0.0
    for number in range(count):
        names = [f"{name}{number}" for name in ("id", "name", "tags")]
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in names}}
        form = StructuredOutputs(kind="json", text=json.dumps(schema))
        began = time.perf_counter()
        compiler.open(form, (), 1).result()
        slowest = max(slowest, time.perf_counter() - began)
        if number + 1 in (count // 10, count // 2, count):
            print(
                f"{number + 1} schemas: {compiler.num_cached} kept, "
                f"{compiler.cached_bytes / 2**20:.0f} MiB by the compiler's estimate, "
                f"{process.memory_info().rss / 2**20:.0f} MiB resident, slowest {slowest:.2f} s",
                flush=True,
            )
    compiler.close()


def run_case(model: str, library: str, name: str) -> str:
    tokenizer = Tokenizer.load(model)
    kind, form, text = CASES[name]
    began = time.perf_counter()
    make = _llguidance(tokenizer) if library == "llguidance" else _xgrammar(tokenizer)
    load_s = time.perf_counter() - began
    began = time.perf_counter()
    try:
        step = make(kind, form)
    except (GrammarError, RuntimeError) as error:
        return f"refused: {error}".splitlines()[0]
    compile_s = time.perf_counter() - began
    masks_s = []
    for token_id in tokenizer.encode(text):
        began = time.perf_counter()
        step(token_id)
        masks_s.append(time.perf_counter() - began)
    return (
        f"load {1e3 * load_s:6.0f}  compile {1e3 * compile_s:8.1f}  "
        f"mask median {1e3 * statistics.median(masks_s):7.3f} worst {1e3 * max(masks_s):7.3f}"
    )


Step = Callable[[int], None]  # makes a mask, then takes in a token


def _llguidance(tokenizer: Tokenizer) -> Callable[[str, str], Step]:
    vocabulary = load_vocabulary(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)

    def make(kind: str, form: str) -> Step:
        asked = StructuredOutputs(kind=kind, text=form)
        state = Grammar(vocabulary, translate(asked)).state()
        taken: list[int] = []

        def step(token_id: int) -> None:
            state.mask(taken)
            taken.append(token_id)

        return step

    return make


def _xgrammar(tokenizer: Tokenizer) -> Callable[[str, str], Step]:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [tokenizer.token(i) for i in range(tokenizer.vocab_size)],
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=sorted(tokenizer.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def make(kind: str, form: str) -> Step:
        compiled = (
            compiler.compile_regex(form) if kind == "regex" else compiler.compile_json_schema(form)
        )
        matcher = xgrammar.GrammarMatcher(compiled)
        bitmask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

        def step(token_id: int) -> None:
            matcher.fill_next_token_bitmask(bitmask)
            matcher.accept_token(token_id)

        return step

    return make


if __name__ == "__main__":
    sys.exit(main())
