"""Episodes of the search world over tokens, with context management in its symbolic form.

What a policy reads is a view of what has happened: the question, a summary if there is one, and the newest turns.
A reset is remembered: it happens once, when the view passes its budget, and the view then fills again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchTools, SearchWorlds

#: Context management begins at this share of the window (DeepSeek-V3.2, arXiv:2512.02556, §4.4).
TRIGGER = 0.8
#: So many turns in a row whose call and result have been seen before, since the last reset, are no progress.
REPEATS = 3
REASONING = ("v32", "keep_all", "keep_tool_turns", "drop_all")
OUTCOMES = ("solved", "wrong answer", "out of window", "no progress", "out of calls", "no call")


@dataclass(frozen=True)
class Turn:
    """One turn in tokens: what was thought, the call (tool, argument), and its result."""

    thought: tuple[int, ...]
    call: tuple[int, ...]
    result: tuple[int, ...]


@dataclass(frozen=True)
class History:
    """What a policy may still see: the ``question``, entities that a summary has ``ruled_out`` (None: there has been
    no summary), and the newest ``turns``."""

    question: tuple[int, ...]
    ruled_out: tuple[int, ...] | None = None
    turns: tuple[Turn, ...] = ()

    def tokens(self, words: SearchVocabulary, reasoning: str = "v32") -> list[int]:
        """The view: with ``"drop_all"`` the thoughts of earlier turns are left out. The other policies keep them
        all, because an episode has a single user message, and calls a tool in every turn."""
        found = list(self.question)
        if self.ruled_out is not None:
            found += [words.ruled_out, *self.ruled_out]
        for turn in self.turns:
            found += turn.thought if reasoning != "drop_all" else ()
            found += turn.call + turn.result
        return found


#: What is left of a history that has passed its budget.
Strategy = Callable[[History, SearchVocabulary], History]


def discard_75(history: History, words: SearchVocabulary) -> History:
    """Without the first 75 % of the turns, rounded down; the newest always stays."""
    return replace(history, turns=history.turns[math.floor(0.75 * len(history.turns)) :])


def discard_all(history: History, words: SearchVocabulary) -> History:
    """Without any turn but the newest, whose result has not been read yet."""
    return replace(history, turns=history.turns[-1:])


def summary(history: History, words: SearchVocabulary) -> History:
    """An oracle: as :func:`discard_all`, and the entities that the dropped pages rule out are written down.

    It is written by hand, reads pages without a mistake and costs no tokens to write; a summary that the policy
    wrote itself could not be better. What an earlier summary ruled out stays.
    """
    dropped = ruled_out(history.turns[:-1], history.question, words)
    known = dict.fromkeys((*(history.ruled_out or ()), *dropped))
    return History(history.question, tuple(known), history.turns[-1:])


STRATEGIES: dict[str, Strategy] = {
    "discard_75": discard_75,
    "discard_all": discard_all,
    "summary": summary,
}


def ruled_out(turns: Sequence[Turn], question: Sequence[int], words: SearchVocabulary) -> list[int]:
    """Entities whose opened page contradicts the question, in the order of their opening."""
    found = []
    for turn in turns:
        if is_page(turn, words) and words.other in words.verdicts_of(question, turn.result):
            found.append(turn.call[1])
    return found


def is_page(turn: Turn, words: SearchVocabulary) -> bool:
    """Whether a turn opened an entity, and was shown it."""
    return turn.call[0] == words.open and turn.result[:1] != (words.error,)


def managed(
    history: History, strategy: Strategy, budget: int, words: SearchVocabulary, reasoning: str = "v32"
) -> History:
    """``strategy`` applied until the view is within ``budget`` tokens, or until it drops no turn any more."""
    while len(history.tokens(words, reasoning)) > budget:
        shorter = strategy(history, words)
        if len(shorter.turns) >= len(history.turns):
            break
        history = shorter
    return history


class SearchEpisode:
    """One episode, played a turn at a time in tokens: read ``prompt``, give what was written to :meth:`write`.

    ``window``: how many tokens the policy can see, those that it writes among them; None has no end. Past 80 % of it
    ``strategy`` is applied, a name of :data:`STRATEGIES` or a function of one's own; the episode is lost when the
    window has no room for a turn, which without a strategy happens once it has filled to its end. ``reasoning``: the
    policy of :data:`REASONING` for thoughts of earlier turns. ``thinking=False`` forbids verdicts. ``outcome`` is
    None while the episode goes on, then one of :data:`OUTCOMES`; ``turns`` keeps everything that happened, and
    ``resets`` the number of turns before each reset.

    Raises ValueError for an unknown strategy or policy, and for a window that has no room beside the question.
    """

    def __init__(
        self,
        worlds: SearchWorlds,
        index: int,
        words: SearchVocabulary | None = None,
        window: int | None = None,
        strategy: str | Strategy | None = None,
        reasoning: str = "v32",
        thinking: bool = True,
    ) -> None:
        if isinstance(strategy, str) and strategy not in STRATEGIES:
            raise ValueError(
                f"strategy={strategy!r} is unknown; use None, a function, or {', '.join(STRATEGIES)}"
            )
        if reasoning not in REASONING:
            raise ValueError(f"reasoning={reasoning!r} is unknown; use one of {', '.join(REASONING)}")
        self.words = SearchVocabulary(worlds) if words is None else words
        self.session = SearchTools(worlds, index)
        self.window, self.reasoning = window, reasoning
        self.strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        self.forbidden = [] if thinking else list(self.words.verdicts)
        self.history = History(tuple(self.words.encode(self.session.question)))
        if window is not None and window < len(self.history.question) + 2:
            raise ValueError(
                f"window={window} has no room for a call beside the question's {len(self.history.question)} "
                f"tokens; give at least {len(self.history.question) + 2}"
            )
        self.turns: list[Turn] = []
        self.resets: list[int] = []
        self._known: set[tuple] = set()
        self._idle = 0
        self.outcome: str | None = None
        self.prompt = self.history.tokens(self.words, reasoning)

    @property
    def reward(self) -> float:
        """1 for the right answer, else 0."""
        return float(self.outcome == "solved")

    @property
    def calls(self) -> int:
        """Calls made so far."""
        return self.session.calls

    @property
    def room(self) -> int:
        """How many tokens the policy may write in this turn, at least 1."""
        longest = self.words.longest_thought + 2
        return longest if self.window is None else min(longest, self.window - len(self.prompt))

    def ended(self, written: Sequence[int]) -> bool:
        """Whether a turn is over: its call is whole, or there is no room for more."""
        return self.words.turn_ended(written) or len(written) >= self.room

    def write(self, written: Sequence[int]) -> None:
        """Take a turn, make its call, and set ``prompt`` and ``outcome``. Raises RuntimeError after the end."""
        if self.outcome is not None:
            raise RuntimeError(f"the episode is over ({self.outcome}); it takes no more turns")
        words = self.words
        if not words.turn_ended(written):
            full = self.window is not None and len(self.prompt) + len(written) >= self.window
            self.outcome = "out of window" if full else "no call"
            return
        thought, call = words.split_turn(written)
        turn = Turn(tuple(thought), tuple(call), self._observed(call))
        self.turns.append(turn)
        self.history = replace(self.history, turns=(*self.history.turns, turn))
        deed = (turn.call, turn.result)
        self._idle = self._idle + 1 if deed in self._known else 0
        self._known.add(deed)
        if self.session.answered is not None:
            self.outcome = "solved" if self.session.solved else "wrong answer"
        elif self._idle >= REPEATS:
            self.outcome = "no progress"
        elif self.calls >= self.session.worlds.max_calls:
            self.outcome = "out of calls"
        else:
            self._look()

    def _observed(self, call: Sequence[int]) -> tuple[int, ...]:
        tool, argument = (self.words.words[token] for token in call)
        try:
            said = getattr(self.session, tool)(argument)
        except ValueError:
            return (self.words.error,)
        return tuple(self.words.encode(said)) if self.session.answered is None else ()

    def _look(self) -> None:
        """What the policy reads next, after a reset if one is due."""
        if self.window is not None and self.strategy is not None:
            found = managed(
                self.history, self.strategy, int(TRIGGER * self.window), self.words, self.reasoning
            )
            if found is not self.history:
                self.resets.append(len(self.turns))
                self.history, self._known, self._idle = found, set(), 0
        self.prompt = self.history.tokens(self.words, self.reasoning)
        if self.window is not None and len(self.prompt) >= self.window:
            self.outcome = "out of window"


def guessers_choice(episode: SearchEpisode) -> int:
    """Among how many entities somebody guesses who has seen the episode, and answers with one that a search has
    shown and that was not opened (any at all, where there is none): 0 if the right one is not among them."""
    words, target = episode.words, episode.words.entities[episode.session.world.target]
    shown = {t for turn in episode.turns if turn.call[0] == words.search for t in turn.result}
    left = (shown & set(words.entities)) - {
        turn.call[1] for turn in episode.turns if turn.call[0] == words.open
    }
    left = left or set(words.entities)
    return len(left) if target in left else 0


@dataclass(frozen=True)
class SearchTask:
    """Episodes in the worlds of ``worlds``; the other fields as in :class:`SearchEpisode`, and its errors at once.

    What :class:`dslib.rl.EpisodeTrainer` trains on and :func:`dslib.rl.play` plays.
    """

    worlds: SearchWorlds = field(default_factory=SearchWorlds)
    window: int | None = None
    strategy: str | Strategy | None = None
    reasoning: str = "v32"
    thinking: bool = True

    def __post_init__(self) -> None:
        self.episode(0)

    def __len__(self) -> int:
        return len(self.worlds)

    @cached_property
    def words(self) -> SearchVocabulary:
        """Words and tokens."""
        return SearchVocabulary(self.worlds)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.words)

    @property
    def max_new_tokens(self) -> int:
        """What an episode may write at most."""
        return self.worlds.max_calls * (self.words.longest_thought + 2)

    def episode(self, index: int) -> SearchEpisode:
        """A new episode in a world."""
        options = (self.window, self.strategy, self.reasoning, self.thinking)
        return SearchEpisode(self.worlds, index, self.words, *options)
