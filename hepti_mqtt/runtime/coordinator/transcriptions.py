"""Transcriptions: texts of speech that are judged, repeated at other temperatures, and aligned with the sound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hepti_mqtt.models.generation import Verdict
from hepti_mqtt.models.speech import SpeechRun
from hepti_mqtt.protocol.frames import DecoderSession
from hepti_mqtt.runtime.coordinator.batches import Array, Batch
from hepti_mqtt.runtime.coordinator.guesses import StepPace
from hepti_mqtt.runtime.coordinator.texts import GeneratedTokens, Generation, TextSoFar


class Attempt(NamedTuple):
    """A finished text and its verdict."""

    text: TextSoFar
    verdict: Verdict


@dataclass(slots=True)
class Transcription(Generation):
    """Texts of one recording in the same session, one after another; the best one is the answer."""

    silence: float | None = None  #: probability of silence, None before the first run
    tried: list[Attempt] = field(default_factory=list)  #: finished texts
    asked: tuple[int, ...] = ()  #: the prompt before the model chose a token that completed it
    sound_rows: int = 0  #: rows of sound to align the text with, 0 if times of words are not wanted
    beginnings: Array | None = None  #: the row of sound at which each token except the last begins

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on the text, None before it."""
        return next((attempt.verdict for attempt in self.tried if attempt.text is self.text), None)

    @property
    def done(self) -> bool:
        """Return whether the text is complete and, if times of words are wanted, aligned."""
        return Generation.done.fget(self) and not self._lacks_alignment  # type: ignore[attr-defined]

    @property
    def _lacks_alignment(self) -> bool:
        wanted = bool(self.sound_rows) and self.beginnings is None and not self.wants_states
        return wanted and self.text_ended and len(self.text.tokens) > 1

    @property
    def _aligns(self) -> bool:
        """Return whether the next run aligns the text: the session holds the sound."""
        return self._lacks_alignment and self.session.rows >= len(self.prompt)

    def next_batch(self, pace: StepPace | None, begun: bool = False) -> tuple[Batch, DecoderSession]:
        """Return the next run like `Generation.next_batch`; the last run aligns all tokens with the sound."""
        if not self._aligns:
            return Generation.next_batch(self, pace, begun)
        first, (start, stop), shape = self._alignment()
        ids = [*self.prompt, *self.text.tokens[:-1]][first:]
        ids += [0] * (shape.tokens - len(ids))  # padding
        inputs = np.array([first, *ids, start, stop, self.sound_rows], np.int32)
        return Batch(shape, inputs), DecoderSession(self.session.number, final=True)

    def _alignment(self) -> tuple[int, tuple[int, int], SpeechRun]:
        """Return the first row of the aligning run, the range of the text's tokens in it, and its shape."""
        assert isinstance(self.shape, SpeechRun)
        shape = self.shape.aligning(len(self.text.tokens) - 1)
        stop = len(self.prompt) + len(self.text.tokens) - 1
        first = max(stop - shape.tokens, 0)
        return first, (len(self.prompt) - first, stop - first), shape

    @property
    def ends_session(self) -> bool:
        """Return whether the session ends with this text: no other text and no alignment can follow."""
        if self.sound_rows:
            return False
        is_last = len(self.tried) + 1 >= len(self.rules.temperatures) and not self._lacks_choice
        return is_last and bool(self.carried.size) and len(self.text.tokens) + 1 >= self.max_new_tokens

    @property
    def _lacks_choice(self) -> bool:
        return bool(self.rules.choices) and not self.asked

    def append_tokens(self, logits: Array) -> GeneratedTokens:
        """Take an answer like `Generation.append_tokens`; another text may follow a complete one."""
        if self._aligns:
            _, rows, _ = self._alignment()
            self.beginnings = logits[slice(*rows), 0]
            self.steps.append(GeneratedTokens(self.text, len(self.text.tokens), ()))
            return self.steps[-1]
        if not self.wants_states and not self.session.rows and self.silence is None:
            self.silence = self.rules.silence(logits)
        step = Generation.append_tokens(self, logits)
        if self.rules.judge is not None and step.taken and self.text_ended:
            self._conclude(self.rules.judge(self.text.tokens, self.text.scores, self.silence or 0.0))
        return step

    def _take(self, logits: Array) -> GeneratedTokens:
        if not self._lacks_choice:
            return Generation._take(self, logits)
        step = GeneratedTokens(self.text, -1, (self.rules.choose_prompt(logits),))
        self.asked = self.prompt
        self.prompt = (*self.rules.opening, *self.prompt, step.taken[0], *self.rules.forced)
        if self.rules.opening:  # it shifts the cached rows to other places
            self.session.leave()
        return step

    def _conclude(self, verdict: Verdict) -> None:
        """Begin another text if this one is not good enough, or choose the best after the last one."""
        self.tried.append(Attempt(self.text, verdict))
        if verdict.again and len(self.tried) < len(self.rules.temperatures):
            attempt = len(self.tried)
            self.text = TextSoFar(attempt=attempt, temperature=self.rules.temperatures[attempt])
            self.published_tokens = ()
            self.session.rows = len(self.prompt) - 1  # the last token of the prompt is computed again
        elif verdict.again:
            self.text = max(self.tried, key=lambda attempt: attempt.verdict.worth).text
            self.session.rows = min(self.session.rows, len(self.prompt))  # later rows belong to another text

    def rewind(self, run: int) -> None:
        """Remove the tokens since a run, and the texts that began later."""
        step, self.beginnings = self.steps[run], None
        if any(later.place < 0 for later in self.steps[run:]):
            self.prompt, self.asked = self.asked, ()
        if step.text is not self.text:
            self.text, self.published_tokens = step.text, ()
        Generation.rewind(self, run)
        if not self.text_ended:
            del self.tried[step.text.attempt :]
