"""From an engine's request to the arguments of ``generate_async``: token ids, or text with pictures.

TensorRT-LLM takes pictures only with text, which it tokenizes again: ``read_prompt_text`` finds the text that has a
prompt's ids. A prompt whose ids do not survive that is refused, because the prompt that was hashed and booked would
differ from the one computed. ``find_media`` finds the media in a prompt that TensorRT-LLM laid out itself, from the
text that is left around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from PIL import Image

from quartet.discovery.host import host_identity
from quartet.engine.base import EngineRequest, Generation
from quartet.engine.media.rows_encoder import RowsReader
from quartet.engine.settings import Modality
from quartet.engine.trtllm.media_model import MediaModel, read_media_model
from quartet.engine.trtllm.media_state import PictureState, read_state
from quartet.engine.validation import MediaLimits, check_media
from quartet.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    MediaLostError,
    ServingError,
    TransferError,
    UnsupportedFieldError,
)
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.media_spans import check_placeholders
from quartet.media.image_file import decode
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES
from quartet.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec
    from quartet.transfer.base import EmbeddingMemory


@dataclass(frozen=True, kw_only=True)
class LlmInputs:
    """What TensorRT-LLM is given for one request.

    Attributes:
        inputs: the inputs of ``generate_async``.
        disaggregated: further fields of ``DisaggregatedParams``; if there are any, the request takes such params even
            without a hand-off (``context_and_generation``).
        expected_token_ids: the prompt that the result must name, as ``is_same_prompt`` compares them; ``None``: it is
            in ``inputs``, or unknown.
        unread_token_ids: the ids of a prompt in which TensorRT-LLM lays out the media itself, with one placeholder for
            each item; ``InputBuilder.laid_out`` finds the items later; ``None``: their positions are known.
        add_special_tokens: for ``SamplingParams``.
        media_names: what KV events will call each item; empty: that is not known.
    """

    inputs: Mapping[str, object] = field(repr=False)
    disaggregated: Mapping[str, object] = field(default_factory=dict, repr=False)
    expected_token_ids: Sequence[int] | None = field(default=None, repr=False)
    unread_token_ids: Sequence[int] | None = field(default=None, repr=False)
    add_special_tokens: bool = True
    media_names: Sequence[str] = ()


class InputBuilder:
    """Builds inputs for one model. Call ``build`` on the thread of the LLM's event loop; ``read_media`` takes its time.

    Attributes:
        embeddings: the pool with pulled embeddings; ``None``: the model takes no media.
        names_media: TensorRT-LLM takes ids of pictures, which its KV events repeat.
    """

    def __init__(self, model: MediaModel | None, model_fingerprint: str) -> None:
        """Without a model, the builder takes text only."""
        self._model = model
        self._limits: MediaLimits | None = None
        self.names_media = False
        self.embeddings: EmbeddingMemory | None = None
        if model is not None:
            self.embeddings = model.make_memory(model_fingerprint)
            self._reader = _ItemReader(model, self.embeddings)
            self._limits = MediaLimits(
                # If sizes are unknown, items may have tokens of their own among the placeholders.
                placeholder_id=model.config.placeholder_id if model.sizes is not None else None,
                block_size=self.embeddings.layout.block_size,
                num_blocks=self.embeddings.memory.num_blocks,
            )

    @property
    def reads_media(self) -> bool:
        """See ``EngineCapabilities``."""
        return self._model is not None

    @property
    def knows_sizes(self) -> bool:
        """Whether it is known beforehand how many tokens each item fills."""
        return self._model is not None and self._model.sizes is not None

    @property
    def placeholder_id(self) -> int | None:
        """See ``EngineCapabilities``."""
        return None if self._model is None else self._model.config.placeholder_id

    @staticmethod
    def has_media(request: EngineRequest) -> bool:
        """Whether the media of ``request`` must be read before TensorRT-LLM can take it."""
        return request.hand_off is None and _names_media(request)

    def read_media(self, request: EngineRequest) -> Sequence[MediaItem]:
        """The media of ``request``, decoded. Any thread may call. Raises as ``build`` does."""
        self._check_media(request)
        return self._reader.read(request)

    def build(self, request: EngineRequest, media: Sequence[MediaItem] | None = None) -> LlmInputs:
        """Build what TensorRT-LLM is given for ``request``; read its media unless ``media`` has them.

        Raises:
            UnsupportedFieldError: field ``media``; this engine takes no media.
            InvalidRequestError: ``prompt_token_ids``: the ids don't survive as text; ``media[1]``: the item is not what
                the prompt says, or can't be used together with the others.
            TransferError: field ``media[1]``; an encode worker holds the item where this engine can't take it.
            MediaLostError: the embeddings are not here.
        """
        generation = request.generation
        token_ids = [*map(int, generation.prompt_token_ids), *map(int, generation.generated_token_ids)]
        if not _names_media(request):
            if self._limits is not None:
                check_media(request, self._limits)
            return LlmInputs(inputs={"prompt_token_ids": token_ids})
        if request.hand_off is not None:
            self._check_media(request)
            return LlmInputs(inputs={"prompt_token_ids": token_ids})
        items = self.read_media(request) if media is None else media
        assert self._model is not None, "it has read media"
        text = read_prompt_text(self._model.tokenizer, token_ids, generation.media)
        inputs = _llm_inputs(self._model, text, items, token_ids)
        if self._model.sizes is not None:
            return _with_names(inputs, items, generation.media) if self.names_media else inputs
        return replace(inputs, expected_token_ids=None, unread_token_ids=collapse(token_ids, generation.media))

    def laid_out(self, generation: Generation, inputs: LlmInputs, became: Sequence[int], vocab_size: int) -> Generation:
        """Return ``generation`` with its prompt as TensorRT-LLM laid it out, and with the positions of its media.

        ``became`` is that prompt, with the output that was given out already. Ids beyond ``vocab_size``, which
        TensorRT-LLM puts in place of media, are placeholders again: a decode, which has no media, is refused with them.

        Raises:
            EngineError: the positions of the media in it can't be determined.
        """
        assert self._model is not None and inputs.unread_token_ids is not None, "there are media to be found"
        spans = find_media(inputs.unread_token_ids, became, self._model.config.placeholder_id)
        num_tokens = len(became) - len(generation.generated_token_ids)
        placeholder_id = self._model.config.placeholder_id
        prompt = [placeholder_id if token_id >= vocab_size else token_id for token_id in became[:num_tokens]]
        return replace(generation, prompt_token_ids=prompt, media=spans)

    def close(self) -> None:
        """Free the pool. May be called twice."""
        if self.embeddings is not None:
            self.embeddings.memory.close()

    def _check_media(self, request: EngineRequest) -> None:
        generation = request.generation
        # Only some items have blocks here; the code that reads the blocks checks them.
        is_unread = self._limits is not None and not generation.media
        if not is_unread:
            check_media(replace(request, media_blocks=()), self._limits)
        if self._model is None:
            raise UnsupportedFieldError("this model takes text only", field="media")
        if is_unread and request.hand_off is None:
            token_ids = [*generation.prompt_token_ids, *generation.generated_token_ids]
            check_placeholders(token_ids, self._model.config.placeholder_id, len(request.media_inputs))


def create_input_builder(spec: EngineSpec, model_fingerprint: str) -> InputBuilder:
    """Create the builder for the model of ``spec``, whose worker computes prompts.

    Raises:
        ConfigError: ``engine.modality``: the model takes no media.
        ModelFilesError, InvalidRequestError: see ``read_media_model``.
    """
    if spec.engine.modality is Modality.TEXT:
        return InputBuilder(None, model_fingerprint)
    model = read_media_model(spec)
    if spec.engine.encodes_media and model is None:
        raise ConfigError("engine.modality: the model takes text only")
    return InputBuilder(model, model_fingerprint)


@dataclass(frozen=True)
class MediaItem:
    """One item of a prompt after it was read, in one of three forms.

    Attributes:
        rows: a tensor ``[num_tokens, hidden_size]``.
    """

    state: PictureState | None = None
    picture: Image.Image | None = None
    rows: Any = None


def is_same_prompt(expected: Sequence[int], became: Sequence[int], media: Sequence[MediaSpan], vocab_size: int) -> bool:
    """Whether TensorRT-LLM computes the ``expected`` prompt, if its result names ``became``.

    In place of ``media`` its input processors put ids beyond the vocabulary, whatever the placeholder is.
    """
    if len(expected) != len(became):
        return False
    places = {place for span in media for place in range(span.first_position, span.first_position + span.num_tokens)}
    return all(
        token_id == wanted or (place in places and token_id >= vocab_size)
        for place, (wanted, token_id) in enumerate(zip(expected, became, strict=True))
    )


def find_media(came: Sequence[int], became: Sequence[int], placeholder_id: int) -> tuple[MediaSpan, ...]:
    """Find the runs of ``became`` that replace the placeholders of ``came``; the tokens between them are unchanged.

    Some models put tokens of their own between an item's parts, so only the text around an item shows where it ends.

    Returns:
        One span for each item, in order, with zeros for its name; each has at least one token.

    Raises:
        EngineError: ``came`` can't have become ``became``, or in more than one way.
    """
    pieces = _split(came, placeholder_id)
    first = _leftmost(pieces, list(became))
    last = _leftmost([piece[::-1] for piece in reversed(pieces)], list(reversed(became)))
    if first is None or last is None:
        raise EngineError("the engine's prompt is not the one that it was given, with its media in it")
    if first != [(len(became) - end, len(became) - begin) for begin, end in reversed(last)]:
        raise EngineError("where each of the prompt's media ends can't be determined: put text between them")
    return tuple(MediaSpan(bytes(MEDIA_ID_SIZE_BYTES), begin, end - begin) for begin, end in first)


@dataclass(frozen=True)
class PromptText:
    """A text, and whether the tokenizer must add the model's special tokens around it."""

    text: str = field(repr=False)
    add_special_tokens: bool


def read_prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> PromptText:
    """The text whose token ids are ``token_ids``, with one placeholder in place of all tokens of each of ``spans``.

    Raises:
        InvalidRequestError: field ``prompt_token_ids``; there is no such text: no tokenizer gives these ids.
    """
    collapsed = collapse(token_ids, spans)
    for candidate in _candidates(tokenizer, collapsed):
        if tokenizer.encode(candidate.text, candidate.add_special_tokens) == collapsed:
            return candidate
    message = "with media, TensorRT-LLM takes text alone, and as text these token ids become others"
    raise InvalidRequestError(message, field="prompt_token_ids")


def collapse(token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> list[int]:
    """``token_ids``, with only the first token of each of ``spans``."""
    collapsed: list[int] = []
    begin = 0
    for span in spans:
        collapsed += token_ids[begin : span.first_position + 1]
        begin = span.first_position + span.num_tokens
    return [*collapsed, *token_ids[begin:]]


def host_name() -> str:
    """The name of this host; processes with the same name see each other's memory."""
    identity = host_identity()
    return f"{identity.boot_id} {identity.ipc_namespace}"


class _ItemReader:
    """Reads the media that came with a request."""

    def __init__(self, model: MediaModel, embeddings: EmbeddingMemory) -> None:
        self._model = model
        self._embeddings = embeddings
        self._rows = RowsReader(model.config.hidden_size, model.max_item_tokens)
        self._host = host_name()

    def read(self, request: EngineRequest) -> list[MediaItem]:
        """The items, in order. Raises as ``InputBuilder.build`` does."""
        spans: Sequence[MediaSpan | None] = request.generation.media or (None,) * len(request.media_inputs)
        inputs = request.media_inputs or (None,) * len(spans)
        blocks = request.media_blocks or ((),) * len(spans)
        if len(inputs) != len(spans) or len(blocks) != len(spans):
            raise InvalidRequestError("not as many media came as the prompt has", field="media")
        items = []
        for index, (span, given, block_ids) in enumerate(zip(spans, inputs, blocks, strict=True)):
            try:
                items.append(self._item(span, given, block_ids))
            except ServingError as error:
                error.field = f"media[{index}]" if error.field is None else f"media[{index}].{error.field}"
                raise
        if any(item.picture is not None for item in items):
            _check_all_pictures(items)
        elif len(items) > 1 or items[0].state is None:
            # TensorRT-LLM takes one handle, and only for a prompt's only item: read the embeddings from the others.
            items = [item if item.state is None else MediaItem(rows=_take(item.state)) for item in items]
        return items

    def _item(self, span: MediaSpan | None, given: MediaFile | bytes | None, block_ids: Sequence[int]) -> MediaItem:
        if isinstance(given, bytes) and span is not None:
            return MediaItem(state=self._state(span, given))
        is_picture = isinstance(given, MediaFile) and given.kind is MediaKind.IMAGE
        if not is_picture and MediaKind.EMBEDDINGS not in self._model.kinds:
            raise UnsupportedFieldError("this model takes no embeddings with TensorRT-LLM")
        if not isinstance(given, MediaFile):
            if not block_ids or span is None:
                raise MediaLostError("the embeddings of the prompt's media are not here")
            return MediaItem(rows=self._pulled(span, block_ids))
        if given.kind is MediaKind.IMAGE:
            return MediaItem(picture=decode(given.data, max_pixels=self._model.max_pixels))
        return MediaItem(rows=self._rows.read(given, self._model.dtype))

    def _state(self, span: MediaSpan, given: bytes) -> PictureState:
        state = read_state(given)
        if state.host != self._host:
            raise TransferError("the picture lies in the memory of another host's GPU")
        if state.num_tokens != span.num_tokens:
            message = f"the picture fills {state.num_tokens} tokens, and the prompt has {span.num_tokens}"
            raise InvalidRequestError(message)
        return state

    def _pulled(self, span: MediaSpan, block_ids: Sequence[int]) -> Any:
        from quartet.engine.media.embeddings import EmbeddingPoolView

        memory, layout = self._embeddings.memory, self._embeddings.layout
        is_inside = min(block_ids) >= 0 and max(block_ids) < memory.num_blocks
        if not is_inside or len(block_ids) * layout.block_size < span.num_tokens:
            raise InvalidRequestError("its blocks do not hold it")
        return EmbeddingPoolView(self._embeddings).read(block_ids, 0, span.num_tokens)


def _names_media(request: EngineRequest) -> bool:
    return bool(request.generation.media or request.media_inputs or request.media_blocks)


def _llm_inputs(model: MediaModel, text: PromptText, items: Sequence[MediaItem], token_ids: Sequence[int]) -> LlmInputs:
    inputs: dict[str, object] = {"prompt": text.text}
    disaggregated: dict[str, object] = {}
    states = [item.state for item in items if item.state is not None]
    pictures = [item.picture for item in items if item.picture is not None]
    if pictures:
        inputs.update(model.picture_inputs(pictures))
    elif len(states) == len(items):
        # With handles, TensorRT-LLM uses only the number and size of these: the inputs must be those that the
        # encoder had, and the pictures themselves are not here.
        blanks = [Image.new("RGB", (state.width, state.height)) for state in states]
        inputs.update(model.picture_inputs(blanks))
        disaggregated["multimodal_embedding_handles"] = [dict(state.handle) for state in states]
        disaggregated["multimodal_hashes"] = [list(state.hashes) for state in states]
    else:
        inputs["multi_modal_embeddings"] = {"image": [item.rows for item in items]}
    return LlmInputs(
        inputs=inputs,
        disaggregated=disaggregated,
        expected_token_ids=token_ids,
        add_special_tokens=text.add_special_tokens,
    )


def _with_names(inputs: LlmInputs, items: Sequence[MediaItem], spans: Sequence[MediaSpan]) -> LlmInputs:
    """Have KV events name the items: a picture by our media id, a handle by the hash that came with it."""
    if all(item.picture is not None for item in items):
        names = [span.media_id.hex() for span in spans]
        return replace(inputs, inputs={**inputs.inputs, "multi_modal_uuids": {"image": names}}, media_names=names)
    hashes = [item.state.hashes for item in items if item.state is not None]
    if len(hashes) != len(items):
        return inputs  # embeddings have no id
    names = ["".join(f"{part & 0xFFFFFFFF:08x}" for part in item) for item in hashes]
    return replace(inputs, media_names=names)


def _check_all_pictures(items: Sequence[MediaItem]) -> None:
    """Refuse embeddings beside pictures. Raises ``InvalidRequestError``, which names the first item of embeddings."""
    for index, item in enumerate(items):
        if item.picture is None:
            message = "where prefill encodes pictures, a prompt has pictures or embeddings, not both"
            raise InvalidRequestError(message, field=f"media[{index}]")


def _take(state: PictureState) -> Any:
    """Copy the embeddings behind a handle to host memory; after this the encoder may free its own."""
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    try:
        return SharedTensorContainer.from_dict(dict(state.handle)).get_local_view().cpu().clone()
    except Exception as error:  # whatever CUDA raises for a handle that is no longer valid
        raise TransferError("the picture's embeddings are not there any more") from error


def _split(token_ids: Sequence[int], placeholder_id: int) -> list[list[int]]:
    """Split the ids into the text before, between and after the placeholders."""
    positions = [index for index, token_id in enumerate(token_ids) if token_id == placeholder_id]
    return [list(token_ids[begin + 1 : end]) for begin, end in pairwise([-1, *positions, len(token_ids)])]


def _leftmost(pieces: Sequence[list[int]], token_ids: list[int]) -> list[tuple[int, int]] | None:
    """Begin and end of each item, if each ends as early as it can; ``None``: the items are not there."""
    head, *between, tail = pieces
    end = len(token_ids) - len(tail)
    if token_ids[: len(head)] != head or token_ids[end:] != tail:
        return None
    items: list[tuple[int, int]] = []
    begin = len(head)
    for piece in between:
        at = _find(token_ids, piece, begin + 1, end)
        if at is None:
            return None
        items.append((begin, at))
        begin = at + len(piece)
    return [*items, (begin, end)] if begin < end else None


def _find(token_ids: list[int], piece: list[int], begin: int, end: int) -> int | None:
    if not piece:
        return begin if begin <= end else None
    while True:
        try:
            begin = token_ids.index(piece[0], begin, end)
        except ValueError:
            return None
        if begin + len(piece) <= end and token_ids[begin : begin + len(piece)] == piece:
            return begin
        begin += 1


def _candidates(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[PromptText]:
    # Try without the special tokens first: some models' picture processors always add them.
    added = tokenizer.encode("", add_special_tokens=True)
    if added and list(token_ids[: len(added)]) == added:
        yield PromptText(tokenizer.decode(token_ids[len(added) :], skip_special_tokens=False), True)
    yield PromptText(tokenizer.decode(token_ids, skip_special_tokens=False), False)
