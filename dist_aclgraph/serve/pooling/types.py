"""Request bodies of embeddings, scores and reranking."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import check_truncation
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings, decode_prompts
from dist_aclgraph.serve.openai.types import MAX_PROMPT
from dist_aclgraph.text.rerank import paired

MAX_INPUTS = 2048  # maximum number of inputs, or of pairs, in one request
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}
INPUT = Meta(extra_json_schema={"anyOf": [_TEXT, _TEXTS, _IDS, _TEXTS | {"items": _IDS}]})
TEXTS = Meta(extra_json_schema={"anyOf": [_TEXT, _TEXTS, {"type": "null"}]})
_DOCUMENT = {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}
DOCUMENTS = Meta(extra_json_schema=_TEXTS | {"items": {"anyOf": [_TEXT, _DOCUMENT]}})


class Truncated(Body, kw_only=True):
    """Attributes:
    truncate_prompt_tokens: maximum number of tokens of a prompt; a longer prompt is truncated. -1
        stands for the number that the context allows.
    """

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None

    def check_fields(self) -> None:
        check_truncation(self.truncate_prompt_tokens)


class EmbeddingRequest(Truncated, kw_only=True):
    model: str
    input: Annotated[Raw, INPUT]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None

    def most_prompt_tokens(self, context_len: int) -> int:
        """Return the maximum number of tokens of an input before its truncation."""
        return context_len if self.truncate_prompt_tokens is None else max(context_len, MAX_PROMPT)

    def prompts(self, context_len: int) -> list[str] | list[list[int]]:
        """Return a list with one entry per input.

        Raises:
            InvalidParameterError: there is no input, there are too many inputs, or an input is
                empty.
            RequestTooLongError: there are more token ids than the context allows.
        """
        found = decode_prompts(
            self.input, MAX_INPUTS, self.most_prompt_tokens(context_len), "input"
        )
        if len(found) > MAX_INPUTS:
            raise _too_many("input", len(found))
        if not found or not all(found):
            raise InvalidParameterError("input must not be empty", "input")
        return found


class Document(Body, kw_only=True):
    text: str


class ScoreRequest(Truncated, kw_only=True):
    """``queries`` and ``documents`` are other names of ``text_1`` and ``text_2``."""

    model: str
    text_1: Annotated[Raw, TEXTS] = ABSENT
    text_2: Annotated[Raw, TEXTS] = ABSENT
    queries: Annotated[Raw, TEXTS] = ABSENT
    documents: Annotated[Raw, TEXTS] = ABSENT
    instruction: str | None = None
    user: str | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of a query and a document.

        Raises:
            InvalidParameterError: a list is missing or too long, or the lists have different
                lengths.
        """
        queries = self._texts("text_1", "queries")
        documents = self._texts("text_2", "documents")
        return paired(queries, documents)

    def _texts(self, name: str, alias: str) -> list[str]:
        param = name if bytes(getattr(self, name)) not in (b"", b"null") else alias
        data = bytes(getattr(self, param))
        if data in (b"", b"null"):
            raise InvalidParameterError(f"missing required parameter: {name}", name)
        check_num_strings(data, MAX_INPUTS, param)
        found = decode(data, str | list[str], param)
        texts = [found] if isinstance(found, str) else list(found)
        _check_texts(texts, param)
        return texts


class RerankRequest(Truncated, kw_only=True):
    PARTS: ClassVar = {"documents": Document}

    model: str
    query: str
    documents: Annotated[Raw, DOCUMENTS]
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0 stands for all documents
    return_documents: bool | None = None
    instruction: str | None = None
    user: str | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if not self.query:
            raise InvalidParameterError("query must not be empty", "query")

    def texts(self) -> list[str]:
        """Return the documents.

        Raises:
            InvalidParameterError: there is no document, there are too many documents, or a document
                is empty.
        """
        data = bytes(self.documents)
        # A document is a text, or an object with two strings: a key and a text.
        check_num_strings(data, 2 * MAX_INPUTS, "documents")
        kind = self.kind_of_part(Document)
        found = decode(data, list[str | kind], "documents")  # type: ignore[valid-type]
        texts = [item if isinstance(item, str) else item.text for item in found]
        _check_texts(texts, "documents")
        return texts


def _check_texts(texts: list[str], param: str) -> None:
    if len(texts) > MAX_INPUTS:
        raise _too_many(param, len(texts))
    if not texts or not all(texts):
        raise InvalidParameterError(f"{param} must not be empty", param)


def _too_many(param: str, count: int) -> InvalidParameterError:
    return InvalidParameterError(
        f"{param} has {count} items; at most {MAX_INPUTS} are allowed in one request", param
    )
