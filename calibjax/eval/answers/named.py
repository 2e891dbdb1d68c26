"""Functions by name: one of a table, or "package.module:function" of the user's."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from calibjax.runtime.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])


def find_function(option: str, name: str, known: Mapping[str, Function], contract: str) -> Function:
    """The function of a name.

    Args:
        option: that gave the name, for messages.
        name: of an entry of `known`, or "package.module:function".
        known: name -> function.
        contract: what a function of the user's takes and returns, for messages.

    Raises:
        UserError: there is no such function.
    """
    if name in known:
        return known[name]
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{option} {name}: expected {', '.join(known)}, or package.module:function, {contract} ({error})."
        ) from error
    if not callable(found):
        raise UserError(f"{option} {name}: expected a function, got {type(found).__name__}.")
    return cast(Function, found)
