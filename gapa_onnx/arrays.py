"""The name under which every room speaks of a numpy array."""

from typing import Any

import numpy.typing as npt

# The element type of most arrays here is that of a user's tensor, which is known only when the model is.
Array = npt.NDArray[Any]
