"""Checks grammars in a process of its own, where one that exhausts time, memory or the stack ends nothing else.

llguidance's bounds hold while a grammar is followed. While it is read, a few hundred characters can take minutes and
gigabytes, and a long chain of rules overflows the stack, which ends the process. So a router, which many tenants share,
has a child check each grammar. ``python -m quartet.engine.guided.checker`` is that child: a line of JSON with a grammar
comes in, a line with what is wrong with it, or nothing, goes out.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

import llguidance

from quartet.engine.guided.grammar import FIELD, LIMITS, check_grammar, llguidance_grammar, refusal
from quartet.engine.sampling import GrammarKind, GuidedDecoding
from quartet.errors import InvalidRequestError, QueueFullError, UnsupportedFieldError

#: CPU seconds that one check may take.
MAX_CPU_S = 1.0
_MAX_MEMORY = 1 << 30
# Where engines compile, the stack is several times as large.
_STACK_SIZE = 2 << 20
# A child that is not scheduled for so long is given up.
_TIMEOUT_S = 60.0
_END_S = 10.0
# So many tokens are tried: the second one shows whether what follows the first brace is too much.
_NUM_STEPS = 3
_TOO_COMPLEX = f"the grammar takes more than {MAX_CPU_S:g} s, {_MAX_MEMORY >> 30} GiB or the stack to be read"


class GrammarChecker:
    """Children that check grammars. ``check`` may be called in several threads; each has a child meanwhile."""

    def __init__(self) -> None:
        """A child is started when the first grammar comes."""
        self._idle: deque[_Child] = deque()
        self._is_closed = False

    def check(self, guided: GuidedDecoding, special_tokens: Mapping[str, int]) -> None:
        """Refuse a grammar that can't be followed. Waits for a child; a new one takes half a second to start.

        Args:
            guided: the grammar.
            special_tokens: ids of the model's special tokens, by their text.

        Raises:
            InvalidRequestError: it is malformed, or too large or complex.
            UnsupportedFieldError: it has a part that can't be followed; names the keyword.
            QueueFullError: the child was killed from outside, or not scheduled: nothing is known of the grammar.
        """
        child = self._take_child()
        answer = child.ask({"kind": guided.kind, "text": guided.text, "special_tokens": special_tokens})
        if answer is None:
            if child.close() == -signal.SIGKILL:  # neither its limits nor the grammar did that
                raise QueueFullError("grammars can't be checked at the moment", retry_delay_s=1.0)
            raise InvalidRequestError(_TOO_COMPLEX, field=FIELD)
        self._idle.append(child)
        if self._is_closed:
            self.close()
        if answer:
            kind = UnsupportedFieldError if answer["is_unsupported"] else InvalidRequestError
            raise kind(answer["message"], field=FIELD)

    def _take_child(self) -> _Child:
        with suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_running:
                    return child
                child.close()
        return _Child()

    def close(self) -> None:
        """End the children; those that still check are ended when they have done so."""
        self._is_closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quartet.engine.guided.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._has_closed = False

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The child's answer; ``None``: it ended."""
        watchdog = threading.Timer(_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:  # it ended before it took the question
            self._has_closed = True
            return None
        finally:
            watchdog.cancel()
        if not line.endswith("\n"):
            self._has_closed = True
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> int:
        """End it, if it has not ended; its exit code."""
        try:
            # One that has closed its output is about to end, by a signal that tells why.
            code = self._process.wait(_END_S if self._has_closed else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it did not take any more
                assert pipe is not None
                pipe.close()
        return code


def main() -> None:
    """Answer the questions on standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the router's
    # `quartet` and the library take some of it themselves.
    limit = _MAX_MEMORY + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(_STACK_SIZE)
    thread = threading.Thread(target=_serve, args=(sys.stdin, sys.stdout))
    thread.start()
    thread.join()


def _serve(questions: IO[str], answers: IO[str]) -> None:
    for line in questions:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
        answer = _answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        _check(GuidedDecoding(GrammarKind(question["kind"]), question["text"]), question["special_tokens"])
    except InvalidRequestError as error:
        return {"message": error.message, "is_unsupported": isinstance(error, UnsupportedFieldError)}
    return {}


def _check(guided: GuidedDecoding, special_tokens: Mapping[str, int]) -> None:
    check_grammar(guided, special_tokens.get)
    grammar = llguidance_grammar(guided, special_tokens.get)
    if "<[" in grammar:  # ids that the tokenizer of bytes lacks
        return
    matcher = llguidance.LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)
    for _ in range(_NUM_STEPS):
        allowed = [] if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(guided.kind, matcher.get_error())
        token_id = next((id for id in range(256) if allowed[id // 8] >> id % 8 & 1), None)
        if token_id is None:  # only the end is left
            return
        matcher.consume_token(token_id)


class _ByteTokens:
    """What llguidance wants of a tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens()), n_vocab=257)

if __name__ == "__main__":
    main()
