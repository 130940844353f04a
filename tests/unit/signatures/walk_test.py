"""What the walk lets pass is what AllenNLP's `FromParams` constructs."""

import random
from typing import Any, Dict, List, Optional, Set, Tuple, Union

import pytest
from allennlp.common import FromParams, Lazy, Params, Registrable

from allennlp_deepspeed.signatures import walk
from allennlp_deepspeed.signatures.callers import Given


class Part(Registrable):
    default_implementation = "one"


@Part.register("one")
class One(Part):
    def __init__(self, size: int = 1, rate: float = 0.5) -> None:
        self.size = size


@Part.register("two", constructor="from_names")
class Two(Part):
    def __init__(self, names: List[str]) -> None:
        self.names = names

    @classmethod
    def from_names(cls, names: List[str], vocab: str, part: Optional[Part] = None) -> "Two":
        return cls(names)


@Part.register("own")
class Own(Part):
    """Of which nothing is known."""

    @classmethod
    def from_params(cls, params: Params, **extras: Any) -> "Own":  # type: ignore[override]
        params.as_dict()
        return cls()


@Part.register("parent")
class Parent(One):
    def __init__(self, flag: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Whole(FromParams):
    def __init__(
        self,
        vocab: str,
        part: Part,
        lazy: Optional[Lazy[Part]] = None,
        parts: List[Part] = None,
        named: Dict[str, Part] = None,
        pair: Tuple[int, Part] = None,
        either: Union[int, List[int], Part] = None,
        several: Set[str] = None,
        maybe: Optional[Union[str, float]] = None,
        untyped=None,
        dictionary: Dict[str, Any] = None,
        flag: bool = False,
    ) -> None:
        if lazy is not None:
            lazy.construct(vocab=vocab)


VALUES: List[Any] = [
    *(None, True, 0, 3, -1.5, "one", "two", "3", "", "none.such.Class", [], {}, [1], ["a"], [None]),
    *({"type": "one"}, {"type": "two"}, {"type": "own", "x": 1}, {"type": "parent", "flag": True}),
    *({"type": None}, {"size": 2}, {"size": "2"}, {"rate": 1}, {"rate": True}, {"sise": 1}),
    {"type": "two", "names": ["a", "b"]},
    {"type": "two", "names": "ab", "part": {"type": "one", "size": 4}},
    {"type": "two", "names": ["a"], "part": {"type": "one", "sizes": 4}},
    {"type": "parent", "flag": 1, "size": 2},
    {"type": "parent"},
    {"type": f"{__name__}.One", "rate": 0.1},
    *([3, "one"], [3, {"size": "x"}], [{"type": "one"}, "parent"], ["one", {"size": 5}]),
    *({"a": "one"}, {"a": {"size": 1}, "b": {"size": None}}, {"a": 3}, {"a": None}),
]
KEYS = [*Whole.__init__.__annotations__, "untyped", "flags"]


def drawn(generator: random.Random) -> Dict[str, Any]:
    config = {key: generator.choice(VALUES) for key in generator.sample(KEYS, 2) if key != "return"}
    if generator.random() < 0.9:
        config.setdefault("part", "one")
    return config


def is_constructed(config: Dict[str, Any]) -> bool:
    try:
        Whole.from_params(Params(config).duplicate(), vocab="words")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_the_walk_finds_what_allennlp_cannot_construct_and_nothing_else(seed: int) -> None:
    generator = random.Random(seed)
    constructed = 0
    for _ in range(120):
        config = drawn(generator)
        found = list(map(str, walk.problems(config, Whole, "", Given().and_("vocab"))))
        expected = is_constructed(config)
        constructed += expected
        assert not (found and expected), (config, found)
        # What a class gives to a part that it constructs itself isn't known.
        assert found or expected or "lazy" in config, config
    assert 10 < constructed < 110


def test_the_registry_is_left_as_it_is() -> None:
    before = {cls: dict(names) for cls, names in Registrable._registry.items()}
    list(walk.problems({"part": {"type": "two", "part": "one"}}, Whole, "", Given()))
    assert {cls: dict(names) for cls, names in Registrable._registry.items()} == before
