"""Tries grammars in a process of its own: `python -m tinker_server.backends.sampler.engine.grammar_process FD`.

A grammar of a few characters can take hours to compile, and nothing stops a running compilation. So this process
compiles it first, within limits of CPU time and memory that the kernel enforces: what takes more ends this process
alone. It is a fork of a process that has imported its libraries, so the next starts at once.
"""

import os
import resource
import signal
from pathlib import Path

import xgrammar

from tinker_server.backends.processes.rpc import OnPart, serve
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.commands import GrammarKind, StartGrammars, TryGrammar

_NICENESS = 10
"""Below the engine, whose cores it shares."""
_MEMORY_BYTES = 1 << 30
"""Limit beyond what the process takes before it compiles anything."""
_CACHE_BYTES = 64 << 20


class Grammars:
    """Compiles with the tokenizer of the engine's model."""

    def __init__(self) -> None:
        self._limit_s = 0.0
        self._vocabulary = 0
        self._compiler: xgrammar.GrammarCompiler | None = None

    def handle(self, command: StartGrammars | TryGrammar, _: OnPart) -> None:
        """Run a command. Raises InvalidInput for what is no grammar, or a grammar that accepts nothing."""
        match command:
            case StartGrammars(tokenizer, limit_s):
                info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
                self._limit_s, self._vocabulary = limit_s, info.vocab_size
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
                os.nice(_NICENESS)
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + _MEMORY_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            case TryGrammar(kind, text):
                signal.setitimer(signal.ITIMER_PROF, self._limit_s)  # its signal ends the process
                try:
                    self._try(kind, text)
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)

    def _try(self, kind: GrammarKind, text: str) -> None:
        try:
            compiled = self._compile(kind, text)
        except (RuntimeError, ValueError) as error:
            raise InvalidInput(f"it is no grammar that this server knows: {str(error)[:300]}") from None
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary)
        limited = xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        if limited and not mask.any():
            raise InvalidInput("no answer is allowed by it")

    def _compile(self, kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
        assert self._compiler is not None, "the first command is StartGrammars"
        match kind:
            case "json":
                return self._compiler.compile_json_schema(text)
            case "regex":
                return self._compiler.compile_regex(text)
            case "grammar":
                return self._compiler.compile_grammar(text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(text)


def main() -> None:
    """Run this process."""
    serve(lambda _: Grammars().handle)


if __name__ == "__main__":
    main()
