"""Commands of ``gpucourse``, one a file: each has `add`, which makes its parser, and what it runs.

`picture` is no command: it is what they share where they draw.
"""
