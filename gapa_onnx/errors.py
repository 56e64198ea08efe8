"""Errors that are the user's to fix: one sentence, and a hint at what to do next; and what only warns."""

from __future__ import annotations


class UserError(Exception):
    """Something about the call, the model or the data; never a bug of ours.

    The command line prints `error: message` and `hint: hint`, and exits with 2.
    """

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


def of_a_missing_runtime(error: Exception) -> UserError | None:
    """What to say where no onnxruntime is installed, which gapa-onnx-core leaves to the user; None of other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name != "onnxruntime":
        return None
    return UserError(
        "there is no onnxruntime",
        "`pip install onnxruntime-gpu`, or `onnxruntime` where there is no GPU; not both, as they share a folder",
    )


class DataWarning(UserWarning):
    """Something about the data that may not be meant; the work goes on.

    The command line prints `warning: message`, once.
    """
