"""
Constructors whose arguments are keys of the config file: their signature, their defaults and their
check come from the declarations in `own_keys`.
"""

import inspect
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.keys import OBJECT, Key, check_names, check_values

Constructor = TypeVar("Constructor", bound=Callable)


def with_defaults(
    section: str,
    owner: str,
    constructor: Callable,
    keys: Dict[str, Key],
    arguments: Dict[str, Any],
) -> Dict[str, Any]:
    """
    Checks the `**arguments` of a constructor, and adds those that aren't given.

    # Parameters

    section : `str`, required.
    owner : `str`, required.
        As of `check_names`.
    constructor : `Callable`, required.
        One with a signature by `takes`.
    keys : `Dict[str, Key]`, required.
        Those to check.
    arguments : `Dict[str, Any]`, required.

    # Raises

    `ConfigurationError`
        If there are others, or one is wrong.
    """
    findings = Findings()
    parameters = inspect.signature(constructor).parameters
    known = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    check_names(section, owner, known, arguments, findings)
    check_values(section, keys, arguments, findings)
    findings.raise_any()
    named = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {**{p.name: p.default for p in named}, **arguments}


def takes(
    keys: Dict[str, Key], like: Optional[Callable] = None, without: Tuple[str, ...] = ()
) -> Callable[[Constructor], Constructor]:
    """
    For a constructor that takes most of its arguments as `**arguments`: gives it the signature that
    `FromParams` and `help` are to read, in which they have names.

    # Parameters

    keys : `Dict[str, Key]`, required.
        Each is an argument. What may be given for it the constructor checks, by `check_values`.
    like : `Callable`, optional (default = `None`)
        A constructor of AllenNLP's whose arguments it takes as well.
    without : `Tuple[str, ...]`, optional (default = `()`)
        But for these.
    """

    def decorate(constructor: Constructor) -> Constructor:
        signature = inspect.signature(constructor)
        *first, others = signature.parameters.values()
        parameters: Dict[str, inspect.Parameter] = {}
        if like is not None:
            parameters.update(inspect.signature(like).parameters)
        for name, key in keys.items():
            # How AllenNLP is to construct an object, it knows itself.
            if key.type is not OBJECT or name not in parameters:
                parameters[name] = inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=key.default, annotation=Any
                )
        left_out = {*without, *signature.parameters}
        named = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in parameters.items()
            if name not in left_out and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        constructor.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*first, *named, others]
        )
        return constructor

    return decorate
