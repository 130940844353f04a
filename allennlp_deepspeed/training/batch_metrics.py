from typing import Any, Callable, Dict

LAZY_METHODS = (
    "__contains__",
    "__delitem__",
    "__eq__",
    "__getitem__",
    "__ior__",
    "__iter__",
    "__len__",
    "__ne__",
    "__or__",
    "__repr__",
    "__reversed__",
    "__ror__",
    "__setitem__",
    "clear",
    "copy",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
)


class BatchMetrics(dict):
    """
    The metrics that callbacks are given after an optimizer step: a `dict` that waits for the device
    only if one of them looks into it.

    # Parameters

    read : `Callable[[], Dict[str, Any]]`, required.
        Returns the metrics. Called once, when something is first asked for.
    """

    def __init__(self, read: Callable[[], Dict[str, Any]]) -> None:
        # Python's encoder for JSON takes the size that a `dict` is stored with for the truth.
        super().__init__(unread=None)
        self._read = read

    def load(self) -> None:
        """
        Reads the metrics, if that hasn't been done, as they are now. The trainer does so before
        they change, if somebody has kept them.
        """
        if self._read is not None:
            read, self._read = self._read, None  # type: ignore[assignment]
            dict.clear(self)
            dict.update(self, read())

    def __reduce__(self) -> Any:
        # What is sent to another process, or saved, is a plain `dict`.
        return dict, (dict(self),)


def _loading_first(name: str) -> Callable:
    method = getattr(dict, name)

    def load_and_call(self: BatchMetrics, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return method(self, *args, **kwargs)

    load_and_call.__name__ = name
    load_and_call.__doc__ = method.__doc__
    return load_and_call


for _name in LAZY_METHODS:
    setattr(BatchMetrics, _name, _loading_first(_name))
