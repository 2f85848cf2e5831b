"""Compiles grammars off the event loop and off the engine's thread, and keeps those that were used last."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import TypeAlias

import llguidance

from quartet.engine.guided.grammar import LIMITS, deep_stacks, llguidance_grammar, refusal
from quartet.engine.guided.masks import Guide
from quartet.engine.sampling import GuidedDecoding
from quartet.errors import EngineError, ServingError

logger = logging.getLogger(__name__)

#: What becomes of a grammar: a guide for one request, or why it can't be followed.
Compiled: TypeAlias = Guide | ServingError

#: A grammar of so many characters compiles in some tens of milliseconds.
SHORT_LENGTH = 8192
_NUM_KEPT = 64
_NUM_KEPT_CHARACTERS = 1 << 20


@dataclass
class _Start:
    """A grammar's start, of which each guide has a copy.

    The copies share what llguidance's lexer has found out, which is quick, but it only grows: at its limits all of them
    fail, whichever led there.

    Attributes:
        compile_s: CPU time that it took to compile.
        num_copies: how many there have been.
    """

    matcher: llguidance.LLMatcher
    compile_s: float
    num_copies: int = 0


class GrammarCompiler:
    """Makes guides for one model's tokens. Called on the event loop; compiling has threads of its own.

    Long grammars, which take up to seconds, have one thread and others another; in each, shorter ones go first. A
    grammar is compiled once while it is among the ones that were used last, at most 64 with a million characters
    together; another guide of it is a copy of its start, in microseconds. What can't be compiled is kept alike.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Read the vocabulary; takes up to seconds for a large one.

        Args:
            tokenizer_json: the text of ``tokenizer.json``.
            vocab_size: token ids are below it.
            eos_token_ids: any of them ends an output.

        Raises:
            ValueError: a tokenizer of a kind that llguidance can't read.
        """
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=sorted(token_id for token_id in eos_token_ids)
        )
        self._short, self._long = _Line("quartet-grammars"), _Line("quartet-long-grammars")
        self._kept: OrderedDict[GuidedDecoding, _Start | ServingError] = OrderedDict()
        self._num_kept_characters = 0
        self._lock = threading.Lock()

    def find(self, guided: GuidedDecoding) -> Compiled | None:
        """What becomes of ``guided``, if that is known; else have it compiled."""
        with self._lock:
            known = self._kept.get(guided)
            if known is None:
                return None
            self._kept.move_to_end(guided)
            if isinstance(known, ServingError):
                return known
            known.num_copies += 1
        return Guide(known.matcher.deep_copy(), partial(self._start_alone, guided, known))

    def compile(
        self, guided: GuidedDecoding, on_end: Callable[[Compiled], None], is_wanted: Callable[[], bool]
    ) -> None:
        """Compile ``guided`` when it is its turn.

        Args:
            guided: what is asked for.
            on_end: called in the compiling thread.
            is_wanted: asked there before it begins: if not, nothing is called.
        """
        length = len(guided.text)
        line = self._short if length <= SHORT_LENGTH else self._long
        line.put(length, lambda: self._compile(guided, on_end, is_wanted))

    def close(self) -> None:
        """Compile nothing more; does not wait for grammars that are being compiled."""
        self._short.close()
        self._long.close()

    def _compile(
        self, guided: GuidedDecoding, on_end: Callable[[Compiled], None], is_wanted: Callable[[], bool]
    ) -> None:
        if not is_wanted():
            return
        found = self.find(guided)
        if found is None:
            try:
                self._keep(guided, self._start_of(guided))
                found = self.find(guided)
            except BaseException:  # a panic in Rust is no Exception; the caller's request ends with it
                logger.exception("a grammar could not be compiled")
        on_end(EngineError("the grammar could not be compiled") if found is None else found)

    def _start_of(self, guided: GuidedDecoding) -> _Start | ServingError:
        try:
            grammar = llguidance_grammar(guided, self._special_token)
        except ServingError as error:
            return error
        began = time.thread_time()
        # It drops the GIL meanwhile.
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return refusal(guided.kind, matcher.get_error())
        return _Start(matcher, time.thread_time() - began)

    def _start_alone(self, guided: GuidedDecoding, spent: _Start, budget_s: float) -> llguidance.LLMatcher | None:
        """Compile ``guided`` for one guide, as its copy of ``spent`` has failed; requests to come get another start.

        ``None``: it has failed by itself, or compiling takes more CPU time than ``budget_s``.
        """
        with self._lock:
            if self._kept.get(guided) is spent:
                self._drop(guided)
            is_own_failure = spent.num_copies == 1
        if is_own_failure or spent.compile_s > budget_s:
            return None
        start = self._start_of(guided)
        return start.matcher if isinstance(start, _Start) else None

    def _keep(self, guided: GuidedDecoding, start: _Start | ServingError) -> None:
        with self._lock:
            self._kept[guided] = start
            self._num_kept_characters += len(guided.text)
            while len(self._kept) > _NUM_KEPT or (
                self._num_kept_characters > _NUM_KEPT_CHARACTERS and len(self._kept) > 1
            ):
                self._drop(next(iter(self._kept)))

    def _drop(self, guided: GuidedDecoding) -> None:
        del self._kept[guided]
        self._num_kept_characters -= len(guided.text)

    def _special_token(self, text: str) -> int | None:
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return token_ids[0] if len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0]) else None


class _Line:
    """Jobs that a thread does, those of the smallest size first."""

    def __init__(self, name: str) -> None:
        self._jobs: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()
        self._numbers = count()
        self._is_closed = False
        self._thread = _thread_with_deep_stack(self._run, name)

    def put(self, size: int, job: Callable[[], None]) -> None:
        self._jobs.put((size, next(self._numbers), job))

    def close(self) -> None:
        self._is_closed = True
        self.put(-1, lambda: None)

    def _run(self) -> None:
        while not self._is_closed:
            _, _, job = self._jobs.get()
            job()


def _thread_with_deep_stack(run: Callable[[], None], name: str) -> threading.Thread:
    # A daemon: a process does not wait for a grammar at its end.
    thread = threading.Thread(target=run, name=name, daemon=True)
    with deep_stacks():
        thread.start()
    return thread
