"""The search world: questions that are hard to find an answer to and easy to check (BrowseComp in small).

Every episode has a fresh world of entities with attributes. A question names the values of some attributes, its
clues, and exactly one entity fits them all. Nobody can read the world but through its tools: a search for one clue
shows a few of the many entities that it fits, an opened entity shows all its attributes, and an answer ends the
episode. So a solver opens candidates, compares, and rules them out, and its context fills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dslib.tasks.verifiable import check_problems

ATTRIBUTES = ("field", "origin", "decade", "prize", "school", "genre", "guild", "river")
#: In the place of a value: the question does not ask for this attribute.
ANY = "any"


@dataclass(frozen=True, eq=False)
class World:
    """``facts`` (entities, attributes) int64, the value of each; ``question``: for each attribute the value that
    is asked for, or None; ``target``: the one entity that fits. ``results``: how many a search shows; ``key``:
    what its order is drawn from."""

    facts: np.ndarray
    question: tuple[int | None, ...]
    target: int
    results: int
    key: tuple[int, int]

    def fits(self, entity: int) -> bool:
        """Whether an entity has every value that is asked for: the verifier."""
        return all(
            asked is None or value == asked
            for value, asked in zip(self.facts[entity].tolist(), self.question, strict=True)
        )

    def matches(self, attribute: int, value: int) -> np.ndarray:
        """All entities with a value, ascending: (n,) int64. No tool shows them."""
        return np.flatnonzero(self.facts[:, attribute] == value)

    def search(self, attribute: int, value: int, call: int) -> tuple[int, ...]:
        """Up to ``results`` random entities with a value, in random order, none where none has it.

        ``call`` numbers the calls of an episode: another search for the same value shows others, some of them
        again, and whoever makes the same calls sees the same answers.
        """
        found = self.matches(attribute, value)
        draw = np.random.default_rng((*self.key, call, attribute, value))
        return tuple(draw.permutation(found)[: self.results].tolist())


@dataclass(frozen=True)
class SearchWorlds:
    """``worlds`` worlds, known by their index: one seed gives every strategy the same ones, paired.

    A clue fits ``pages`` pages of ``results`` entities on average, so there are pages·results·values entities, and
    the ``difficulty`` of a question is clues × pages, the pages of results in which its answer may hide. An
    episode may make ``max_calls`` calls, its answer among them. Worlds of one ``seed`` whose ranges ``skip`` …
    ``skip + worlds`` do not overlap are drawn independently.

    Raises ValueError for sizes out of bounds.
    """

    worlds: int = 100_000
    seed: int = 0
    skip: int = 0
    clues: int = 3
    pages: int = 6
    results: int = 4
    attributes: int = 4
    values: int = 6
    max_calls: int = 40

    def __post_init__(self) -> None:
        check_problems(attributes=(self.attributes, 1, len(ATTRIBUTES)))
        check_problems(clues=(self.clues, 1, self.attributes), values=(self.values, 2, 99))
        check_problems(pages=(self.pages, 1, 99), results=(self.results, 1, 99))
        check_problems(max_calls=(self.max_calls, 1, 10_000), worlds=(self.worlds, 1, 2**40))
        check_problems(skip=(self.skip, 0, 2**40), seed=(self.seed, 0, 2**40))

    @property
    def entities(self) -> int:
        """How many entities a world has: pages · results · values."""
        return self.pages * self.results * self.values

    @property
    def difficulty(self) -> int:
        """clues × pages."""
        return self.clues * self.pages

    def __len__(self) -> int:
        return self.worlds

    def world(self, index: int) -> World:
        """One world, the same for the same seed and index. Raises IndexError where there is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"world {index} does not exist; there are {len(self)}, counted from 0")
        key = (self.seed, self.skip + int(index))
        draw = np.random.default_rng(key)
        facts = draw.integers(self.values, size=(self.entities, self.attributes))
        target = int(draw.integers(self.entities))
        asked = np.sort(draw.permutation(self.attributes)[: self.clues])
        # Whoever else fits gets another value of one clue, so that there is one answer.
        others = (facts[:, asked] == facts[target, asked]).all(1)
        others[target] = False
        for entity in np.flatnonzero(others):
            attribute = draw.choice(asked)
            facts[entity, attribute] += draw.integers(1, self.values)
        facts %= self.values
        question = tuple(int(facts[target, a]) if a in asked else None for a in range(self.attributes))
        return World(facts, question, target, self.results, key)

    def question(self, index: int) -> str:
        """A question as text: one word an attribute, ``?prize=3`` where it is asked for and ``?prize=any``
        where it is not."""
        return question_text(self.world(index).question)

    @cached_property
    def entity_names(self) -> tuple[str, ...]:
        """e0, e1, …: they mean nothing, and another entity bears them in the next world."""
        return tuple(f"e{number}" for number in range(self.entities))

    @cached_property
    def fact_names(self) -> tuple[str, ...]:
        """``field=0`` …, all values of the first attribute, then of the next."""
        return tuple(fact_text(a, v) for a in range(self.attributes) for v in range(self.values))


def fact_text(attribute: int, value: int) -> str:
    """What a page says and a search asks for: ``prize=3``."""
    return f"{ATTRIBUTES[attribute]}={value}"


def question_text(question: tuple[int | None, ...]) -> str:
    """As :meth:`SearchWorlds.question`."""
    words = (ANY if value is None else value for value in question)
    return " ".join(f"?{name}={word}" for name, word in zip(ATTRIBUTES, words, strict=False))


@dataclass
class SearchTools:
    """The tools of one episode; their arguments and results are text, as a harness passes them on.

    ``search``, ``open`` and ``answer`` raise ValueError, with what would do, for what is not in the world: a
    harness shows that to the model. Each counts as a call, errors too. ``answered`` is the entity that was given
    as the answer, and ``solved`` whether it fits.
    """

    worlds: SearchWorlds
    index: int
    calls: int = 0
    answered: int | None = None
    world: World = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.world = self.worlds.world(self.index)

    @property
    def question(self) -> str:
        """The question as text, :meth:`SearchWorlds.question`."""
        return question_text(self.world.question)

    @property
    def solved(self) -> bool:
        """Whether the question has been answered by the entity that fits."""
        return self.answered is not None and self.world.fits(self.answered)

    def search(self, clue: str) -> str:
        """Names of a few entities that a clue fits.

        Args:
            clue: one attribute and its value, such as field=3.
        """
        self.calls += 1
        number = _position(self.worlds.fact_names, clue, "clue", "an attribute and a value, such as field=3")
        found = self.world.search(*divmod(number, self.worlds.values), self.calls)
        return " ".join(self.worlds.entity_names[entity] for entity in found) or "nothing"

    def open(self, entity: str) -> str:
        """All attributes of an entity, with their values.

        Args:
            entity: its name, such as e17.
        """
        self.calls += 1
        number = _position(self.worlds.entity_names, entity, "entity", "a name from a search, such as e17")
        return " ".join(fact_text(a, v) for a, v in enumerate(self.world.facts[number].tolist()))

    def answer(self, entity: str) -> str:
        """Give the entity that fits the question, and end the episode.

        Args:
            entity: its name, such as e17.
        """
        self.calls += 1
        self.answered = _position(
            self.worlds.entity_names, entity, "entity", "a name from a search, such as e17"
        )
        return "answered"


def _position(names: tuple[str, ...], name: str, what: str, example: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise ValueError(f"{what}={name!r} is not in this world; give {example}") from None
