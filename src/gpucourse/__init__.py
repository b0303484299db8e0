"""The instruments of the course "What the GPU actually executes".

Importing the package is light: torch, matplotlib, pint and ipywidgets load when a function first needs them.

>>> import gpucourse
>>> gpucourse.__version__
'0.1.0'
"""

from __future__ import annotations

__version__ = "0.1.0"
