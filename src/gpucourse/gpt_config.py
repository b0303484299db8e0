"""The shape of the course's small GPT: numbers that can be counted by hand, without torch.

>>> night = night_config()
>>> night.parameters
124475904
"""

from __future__ import annotations

import dataclasses
from numbers import Integral

__all__ = ["GPTConfig", "night_config"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The numbers that fix a GPT's shape.

    Attributes
    ----------
    layers
        Blocks of attention and MLP.
    width
        Numbers that stand for one token between the blocks.
    heads
        Heads of attention, each of ``width / heads`` numbers.
    vocabulary
        Rows of the token table, which the output layer shares.
    context
        The longest row of tokens; the position table has as many rows.

    Raises
    ------
    TypeError, ValueError
        A number is not whole or below 1, or `width` does not divide into `heads`.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(
                value, Integral
            ):  # numpy's integers are good ones, too
                raise TypeError(f"GPTConfig: {field.name} must be a whole number, not {value!r}")
            object.__setattr__(self, field.name, int(value))
            if value < 1:
                raise ValueError(f"GPTConfig: {field.name} is {value}; wanted 1 or more")
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig: width {self.width} does not divide into {self.heads} heads; "
                f"{self.width % self.heads} would be left over"
            )

    @property
    def head_width(self) -> int:
        """Numbers a head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Parameters, the position table counted, the shared token table counted once.

        A block has four matrices, W·3W, W·W, W·4W and 4W·W with a shift each, and two layer norms.
        """
        w = self.width
        block = (3 * w * w + 3 * w) + (w * w + w) + (4 * w * w + 4 * w) + (4 * w * w + w) + 2 * 2 * w
        return self.vocabulary * w + self.context * w + self.layers * block + 2 * w


def night_config() -> GPTConfig:
    """Give the shape of the model that trains at night: 124 M parameters."""
    return GPTConfig(layers=12, width=768, heads=12, vocabulary=50_304, context=1_024)
