"""The error of a door check: which field of a request is wrong, and what it would take."""


class ParameterError(ValueError):
    """A value outside its bounds; `param` is the field a client would have to change."""

    code: str | None = None  # for a client's program, where `param` alone does not tell

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ParameterError):
    """Prompt and output together are longer than the model takes."""

    code = "context_length_exceeded"


class UnknownField(ParameterError):
    """A field that nobody reads, most likely misspelled."""

    code = "unknown_field"
