"""An answer as a row of blocks, for APIs in which text, reasoning and each call have a place of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from quartet.api.openai.answers import Answer, Head
from quartet.api.request import ChoiceFinished
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.text.parsed import Parsed, ToolCallDelta


class BlockKind(Enum):
    """What a block holds."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        index: its place in the answer.
        call_index, call_id, name: of a call.
        is_complete: it is whole: a call is once the model has ended it, another block unless the output was cut in it.
        pieces: of its text, or of a call's arguments; empty where nobody keeps them.
    """

    kind: BlockKind
    index: int
    call_index: int = -1
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that was kept of it."""
        return "".join(self.pieces)


class BlockAnswer(Answer):
    """An ``AnswerSink`` of one choice whose parts become blocks; subclasses show or keep these.

    Reasoning, text and calls of one part have lost their order. Reasoning comes first then, and calls last.
    """

    __slots__ = ("_num_blocks", "_open")

    def __init__(self, head: Head) -> None:
        """There is no block."""
        super().__init__(head)
        self._open: Block | None = None
        self._num_blocks = 0

    def begin_block(self, block: Block) -> None:
        """``block`` begins; it is the only one that is open."""
        raise NotImplementedError

    def extend_block(self, block: Block, text: str) -> None:
        """``block`` goes on with ``text``."""
        raise NotImplementedError

    def end_block(self, block: Block) -> None:
        """``block`` has ended."""
        raise NotImplementedError

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Never called: no such API asks for them."""
        raise AssertionError("nobody has asked for them")

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more text."""
        if text:
            block = self._open
            if block is None or block.kind is not BlockKind.TEXT:
                block = self._begin(BlockKind.TEXT)
            self.extend_block(block, text)

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take more, with reasoning or tool calls in it."""
        calls = list(parsed.tool_calls)
        if calls and self._continues(calls[0]):  # what else came is behind its end
            self._add_call(calls.pop(0))
        if parsed.reasoning:
            block = self._open
            if block is None or block.kind is not BlockKind.REASONING:
                block = self._begin(BlockKind.REASONING)
            self.extend_block(block, parsed.reasoning)
        self.add(choice, token_offset, (), parsed.text, ())
        for call in calls:
            self._add_call(call)

    def finish(self, finished: ChoiceFinished) -> None:
        """The answer has ended, and so has its last block."""
        is_cut = finished.reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        self._end(is_complete=not is_cut and self._open is not None and self._open.kind is not BlockKind.CALL)
        super().finish(finished)

    def _continues(self, call: ToolCallDelta) -> bool:
        block = self._open
        return block is not None and block.kind is BlockKind.CALL and block.call_index == call.index

    def _add_call(self, call: ToolCallDelta) -> None:
        if not self._continues(call):
            if not call.name:  # the end of a call that has ended, which is said twice after an attempt that broke
                return
            self._begin(BlockKind.CALL, call)
        block = self._open
        if block is None:
            return
        if call.arguments:
            self.extend_block(block, call.arguments)
        if call.is_complete:
            self._end(is_complete=True)

    def _begin(self, kind: BlockKind, call: ToolCallDelta | None = None) -> Block:
        self._end(is_complete=self._open is not None and self._open.kind is not BlockKind.CALL)
        block = Block(kind, self._num_blocks)
        if call is not None:
            block.call_index, block.call_id, block.name = call.index, call.id, call.name
        self._num_blocks += 1
        self._open = block
        self.begin_block(block)
        return block

    def _end(self, *, is_complete: bool = False) -> None:
        block, self._open = self._open, None
        if block is not None:
            block.is_complete = is_complete
            self.end_block(block)


class KeptBlocks(BlockAnswer):
    """Keeps all blocks, for an answer that is written whole."""

    __slots__ = ("blocks",)

    def __init__(self, head: Head) -> None:
        """There is no block."""
        super().__init__(head)
        #: In order.
        self.blocks: list[Block] = []

    def begin_block(self, block: Block) -> None:
        """Keep it."""
        self.blocks.append(block)

    def extend_block(self, block: Block, text: str) -> None:
        """Keep more of it."""
        block.pieces.append(text)

    def end_block(self, block: Block) -> None:
        """It is kept."""
