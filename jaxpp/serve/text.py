"""Tokens to text as they come: whole characters, and nothing of the text that ends the answer."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp.data import Tokenizer

_CONTEXT = 8  # tokens of the prompt, at most, behind which the answer is decoded
_LONG = 16  # tokens without a clean end, each time after which one is looked for inside them
_MARK = "\ufffd"  # what a decoder writes for bytes that are no character
_INCOMPLETE = 3  # most bytes, so most marks, of a character that may still be completed


class TextStream:
    """The text of one answer.

    A stop text is found where it is first complete, character by character, however the characters were spread over
    tokens; among several that are complete at the same character, the longest counts. Only the answer is searched.

    Attributes:
        stopped: the stop text that ended the answer, or None; from then on nothing is returned.

    Cost:
        Amortised constant time for each token and stop text, whatever the lengths of the answer and of the stops.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        """Begin an answer behind a prompt: alone, its first token could lose its leading space."""
        self.stopped: str | None = None
        self._characters = _Characters(tokenizer, prompt_ids)
        self._stops = [_Stop(text) for text in stop]
        self._pending = ""  # certain characters that may begin a stop text

    def push(self, token_id: int, heed: bool = True) -> str:
        """Return the text that is certain now.

        Args:
            token_id: the next token of the answer.
            heed: False: stop texts that touch this token's text do not count.
        """
        return self._heeded(self._characters.push(token_id), heed)

    def flush(self) -> str:
        """Return, at the end of the answer, what was held back; what is no whole character becomes U+FFFD."""
        text = self._heeded(self._characters.flush(), heed=True)
        if self.stopped is not None:
            return text
        text, self._pending = text + self._pending, ""
        return text

    def _heeded(self, text: str, heed: bool) -> str:
        if self.stopped is not None:
            return ""
        if not heed:
            for stop in self._stops:
                stop.matched = 0
            text, self._pending = self._pending + text, ""
            return text
        return self._searched(text) if self._stops else text

    def _searched(self, text: str) -> str:
        start = len(self._pending)
        self._pending += text
        for end, character in enumerate(text, start + 1):
            complete = [stop.text for stop in self._stops if stop.completes(character)]
            if complete:
                self.stopped = max(complete, key=len)
                certain, self._pending = self._pending[: end - len(self.stopped)], ""
                return certain
        kept = len(self._pending) - max(stop.matched for stop in self._stops)
        certain, self._pending = self._pending[:kept], self._pending[kept:]
        return certain


class _Stop:
    """How much of one text the characters so far end in.

    Source: Knuth, Morris and Pratt, Fast pattern matching in strings (1977), section 2.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0] * len(text)  # of each prefix: its longest end, but itself, that is a prefix too
        for at in range(1, len(text)):
            self._shorter[at] = self._extended(text[at], self._shorter[at - 1])

    def completes(self, character: str) -> bool:
        self.matched = self._extended(character, self.matched)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[-1]
        return True

    def _extended(self, character: str, matched: int) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)


class _Characters:
    """Decode tokens as they come, behind the last that ended with a whole character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = _whole_end(tokenizer, prompt)
        self._behind = tokenizer.decode(self._before)
        self._held: list[int] = []  # tokens since
        self._last = ""  # their text
        self._sent = 0  # characters of it that were returned

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._text()
        if text and text == self._last and not self._tokenizer.decode([token]):
            self._held.pop()  # a special token inside a character: decoders pass over it
            return ""
        self._last = text
        marks = min(len(text) - len(text.rstrip(_MARK)), _INCOMPLETE)
        certain = text[self._sent : len(text) - marks]
        self._sent += len(certain)
        if not marks:
            self._settle(len(self._held), text)
        elif len(self._held) % _LONG == 0:
            self._settle_inside(text)
        return certain

    def flush(self) -> str:
        return self._text()[self._sent :]

    def _text(self) -> str:
        """Return the text of the held tokens."""
        if not self._held:
            return ""
        whole = self._tokenizer.decode([*self._before, *self._held])
        behind = self._behind
        if whole.startswith(behind) and (behind or not whole.startswith(_MARK)):
            return whole[len(behind) :]
        # Bytes that are no character turn the bytes in front of them into marks, in tokenizers that fall back to bytes.
        return self._tokenizer.decode(self._held)

    def _settle(self, count: int, text: str) -> None:
        """Decode behind the first held tokens, which have this text, from now on."""
        settled, self._held = self._held[:count], self._held[count:]
        self._sent -= min(len(text), self._sent)
        self._last = ""
        if text:
            self._before = settled
        elif len(self._before) < _CONTEXT:  # special tokens; and a space that opens a text has no text itself
            self._before = [*self._before, *settled]
        self._behind = self._tokenizer.decode(self._before)

    def _settle_inside(self, text: str) -> None:
        """Settle the first held tokens up to where a token begins with a character, if it does anywhere."""
        half = len(self._held) // 2
        for count in range(half, half + _LONG // 2):
            head, tail = (self._tokenizer.decode(part) for part in (self._held[:count], self._held[count:]))
            if head + tail == text and 0 < len(head) <= self._sent:
                return self._settle(count, head)


def _whole_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the fewest tokens that end a prompt and begin with a whole character; none, if 8 do not."""
    for count in range(1, min(_CONTEXT, len(prompt)) + 1):
        end = [int(token) for token in prompt[len(prompt) - count :]]
        text = tokenizer.decode(end)
        if text and not text.startswith(_MARK):
            return end
    return []
