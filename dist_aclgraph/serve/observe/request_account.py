"""The account of one request: its tokens, times and outcome, for the access log and for traces."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from starlette.types import Scope

from dist_aclgraph.logs import ACCESS, event

# Key of the request's account in the ASGI scope. A request has an account only if an access log or
# traces are configured.
ACCOUNT = "dist_aclgraph.account"
KEY_NAME = "dist_aclgraph.key_name"  # item of the ASGI scope with the name of the API key
FIRST_ERROR = 400  # the lowest HTTP status that is an error
FIRST_SERVER_ERROR = 500  # the lowest HTTP status that is an error of the server
DONE, CLIENT_GONE, FAILED, UNANSWERED = "done", "client_gone", "failed", "unanswered"

logger = logging.getLogger(ACCESS)


@dataclass
class RequestAccount:
    """Tokens, times and outcome of one HTTP request; used on one event loop only.

    Attributes:
        began_s: time at which the request arrived, by the monotonic clock.
        status: HTTP status of the answer; 0 before the answer begins.
        num_prompt_tokens, num_tokens: number of tokens of all prompts, and of all choices.
        submitted_s: time at which the request was sent to an engine, by the monotonic clock; None
            until then.
        first_token_s: time at which the first token arrived, by the monotonic clock; None until
            then.
        prefill_s: time from the end of the wait in the engine's queue to the first token; 0 if
            unknown.
        finish_reason: the reason why the last choice ended.
        error: name of the error that ended the request; ``CLIENT_GONE`` if the client ended it.
    """

    request_id: str
    scope: Scope
    began_s: float = field(default_factory=time.monotonic)
    status: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    submitted_s: float | None = None
    first_token_s: float | None = None
    prefill_s: float = 0.0
    finish_reason: str | None = None
    error: str = ""

    def resume(self, created_s: float) -> None:
        """Set the time of arrival to ``created_s``: the time (wall clock) at which a previous
        process got the request.
        """
        self.began_s = time.monotonic() - max(0.0, time.time() - created_s)

    @property
    def outcome(self) -> str:
        """The outcome of the request: ``DONE``, or the name of an error."""
        if self.error or not self.status:
            return self.error or UNANSWERED
        return FAILED if self.status >= FIRST_ERROR else DONE

    def write(self) -> None:
        """Write the request's line of the access log."""
        first_s, client = self.first_token_s, self.scope.get("client")
        event(
            logger,
            "request",
            id=self.request_id,
            key=self.scope.get(KEY_NAME, "-"),
            client=client[0] if client else "-",
            method=self.scope["method"],
            path=self.scope["path"],
            status=self.status or None,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_tokens,
            first_token_s=None if first_s is None else first_s - self.began_s,
            total_s=time.monotonic() - self.began_s,
            finish=self.finish_reason,
            outcome=self.outcome,
        )


def note_error(scope: Scope, error: BaseException) -> None:
    """Record in the request's account, if there is an account, which error ended the request."""
    account: RequestAccount | None = scope.get(ACCOUNT)
    if account is not None:
        account.error = account.error or type(error).__name__
