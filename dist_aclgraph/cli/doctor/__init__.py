"""``dist-aclgraph doctor``: for each part that a machine needs, whether it is there, and the
remedy.
"""
