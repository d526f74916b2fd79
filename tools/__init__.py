"""Tools for developers, which are no part of the package: for example, the list of pinned packages,
and the rig of ``make chaos``.
"""
