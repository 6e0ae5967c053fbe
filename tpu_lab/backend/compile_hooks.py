"""What Dynamo sees in place of the module hooks of where.py while it traces: nothing, so a profile breaks no graph.

The one file of the backend that Dynamo may trace into.
"""

from __future__ import annotations


def enter(mod, args):
    """Stands for where.enter."""


def leave(mod, args, output):
    """Stands for where.leave."""
