"""One question to an OpenAI-compatible endpoint, and what its reply holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from inrun.variants.files import VariantsError
from inrun.variants.filters import clean
from inrun.variants.prompts import CATEGORIES, SYSTEM

if TYPE_CHECKING:
    import openai

OPENAI = "https://api.openai.com/v1"
KEY = "OPENAI_API_KEY"
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class NoReplyError(Exception):
    """No reply to this question, after all tries; others may fare better."""


class Reply(NamedTuple):
    """What the endpoint said. It goes into the cache as it is, readable or not."""

    content: str | None
    refusal: str | None
    finish: str | None

    def read(self) -> tuple[dict[str, list[Any]], str | None]:
        """The candidates by category, and what was wrong with the reply, if anything.

        A reply with missing keys still gives what it has.
        """
        if self.refusal or self.finish == "content_filter":
            return {}, "refusal"
        if not self.content or not self.content.strip():
            return {}, "empty reply"
        text = self.content.strip()
        fenced = _FENCE.fullmatch(text)
        try:
            answer = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            return {}, "cut off" if self.finish == "length" else "malformed JSON"
        if not isinstance(answer, dict):
            return {}, "malformed JSON"
        found = {}
        for category in CATEGORIES:
            value = answer.get(category)
            if isinstance(value, str):
                value = [value]
            if isinstance(value, list):
                found[category] = value
        return found, None if len(found) == len(CATEGORIES) else "missing keys"


class Endpoint:
    """A model behind a URL. The key is read from the environment and goes nowhere but there."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        key_env: str = KEY,
        timeout: float = 120,
        retries: int = 5,
    ) -> None:
        self.model = model
        self.base_url = base_url or OPENAI
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise VariantsError(f"--base-url {self.base_url}: write it as http(s)://HOST/v1")
        self.host = parts.hostname  # for messages: a URL may carry a password
        self.timeout = timeout
        self.tries = retries + 1
        self._key = os.environ.get(key_env, "").strip()
        self._key_env = key_env
        if not self._key and self.base_url == OPENAI:
            raise VariantsError(
                f"{self.host} wants a key and the environment variable {key_env} is not set: set "
                "it, name another one with --key-env, or ask another endpoint with --base-url"
            )
        if not self._key.isascii() or not self._key.isprintable():
            raise VariantsError(f"the key in {key_env} has characters that no header can carry")

    def connect(self) -> openai.AsyncOpenAI:
        try:
            import openai
        except ImportError:
            raise VariantsError(
                "inrun variants asks through the openai library, which is not installed: "
                "pip install 'inrun[variants]'"
            ) from None
        from inrun.variants.bounded import bounded_client

        return openai.AsyncOpenAI(
            api_key=self._key or "none",  # local servers want none; the library wants some
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.tries - 1,  # rate limits, timeouts, 5xx; it honours Retry-After
            http_client=bounded_client(self.timeout),
        )

    async def ask(
        self, client: openai.AsyncOpenAI, prompt: str, fields: Mapping[str, Any]
    ) -> Reply:
        """``fields``: the rest of the request, as response_format and seed."""
        import openai

        from inrun.variants.bounded import ReplyTooLargeError

        try:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": prompt},
                ],
                extra_body=dict(fields),
            )
            choice = answer.choices[0]
            said, end = choice.message, choice.finish_reason
            return Reply(self._hide(said.content), self._hide(said.refusal), self._hide(end))
        except (openai.AuthenticationError, openai.NotFoundError) as error:
            raise VariantsError(
                f"{self.host} answered {self._status(error)}: check --model, --base-url and the "
                f"key in {self._key_env}" + ("" if self._key else " (not set)")
            ) from None
        except openai.APITimeoutError:
            raise NoReplyError(
                f"no answer from {self.host} within {self.timeout:g} s, {self._times()}; a larger "
                "--timeout may help"
            ) from None
        except openai.APIConnectionError as error:
            why = str(error.__cause__ or error)
            raise NoReplyError(
                f"cannot reach {self.host}, {self._times()}: {self._short(why)}"
            ) from None
        except openai.APIStatusError as error:
            raise NoReplyError(f"{self.host} answered {self._status(error)}") from None
        except ReplyTooLargeError as error:
            raise NoReplyError(f"{self.host} {error}") from None
        except (
            openai.OpenAIError, AttributeError, LookupError, RecursionError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise NoReplyError(
                f"{self.host} did not answer as an OpenAI-compatible endpoint does; is --base-url "
                f"right, often ending in /v1? ({type(error).__name__})"
            ) from None

    def _status(self, error: openai.APIStatusError) -> str:
        told = error.body.get("message") if isinstance(error.body, dict) else None
        return f"HTTP {error.status_code}, {self._short(str(told or error.message))}"

    def _short(self, text: str) -> str:
        line = clean(self._hide(text) or "")
        return line if len(line) <= 300 else line[:299] + "…"

    def _times(self) -> str:
        return "once" if self.tries == 1 else f"{self.tries} times"

    def _hide(self, text: str | None) -> str | None:
        """Remove the key from a message: some servers repeat it."""
        return text.replace(self._key, "***") if text and self._key else text
